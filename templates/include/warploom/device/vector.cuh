// 16 bytes of a stored row, from global memory to floats in registers.
#pragma once

#include <warploom/device/widen.cuh>

namespace warploom {

// Past L1, for what nobody reads a second time. Words of what does not exist stay as they are.
WL_FN void load_once(long long from, bool exists, uint4& words) {
  asm volatile(
      "{\n"
      "  .reg .pred exists;\n"
      "  setp.ne.s32 exists, %5, 0;\n"
      "  @exists ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "l"(from), "r"(int(exists)));
}

WL_FN void unpack(unsigned word, bfloat16_t, float* numbers) {
  numbers[0] = __uint_as_float(word << 16);
  numbers[1] = __uint_as_float(word & 0xffff0000u);
}
WL_FN void unpack(unsigned word, half_t, float* numbers) {
  numbers[0] = to_float(half_t{static_cast<unsigned short>(word)});
  numbers[1] = to_float(half_t{static_cast<unsigned short>(word >> 16)});
}
template <class Narrow>
WL_FN void unpack(unsigned word, Narrow, float* numbers) {
  unsigned low, high;
  widen_to_half(word, Narrow{}, low, high);
  unpack(low, half_t{}, numbers);
  unpack(high, half_t{}, numbers + 2);
}
template <class Element>
WL_FN void unpack(const uint4& words, Element, float* numbers) {
  constexpr int kOfWord = 4 / int(sizeof(Element));
  unpack(words.x, Element{}, numbers);
  unpack(words.y, Element{}, numbers + kOfWord);
  unpack(words.z, Element{}, numbers + 2 * kOfWord);
  unpack(words.w, Element{}, numbers + 3 * kOfWord);
}

}  // namespace warploom
