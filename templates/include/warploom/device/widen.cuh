// 8-bit numbers to the 16-bit floats that tensor cores multiply, four at a time, in registers.
#pragma once

#include <warploom/device/load.cuh>

namespace warploom {

// Bytes 0 and 1 to `low`, 2 and 3 to `high`, as pairs of half-precision numbers; exact.
WL_FN void widen_to_half(unsigned bytes, e5m2_t, unsigned& low, unsigned& high) {
  low = __byte_perm(bytes, 0, 0x1404);
  high = __byte_perm(bytes, 0, 0x3424);
}

// The last bits of 1024 + u are u, which is 128 more than the integer.
WL_FN void widen_to_half(unsigned bytes, i8_t, unsigned& low, unsigned& high) {
  const unsigned shifted = bytes ^ 0x80808080u;
  low = __byte_perm(shifted, 0x64646464u, 0x4140);
  high = __byte_perm(shifted, 0x64646464u, 0x4342);
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64806480u));
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64806480u));
}

#if __CUDA_ARCH__ >= 890
WL_FN void widen_to_half(unsigned bytes, e4m3_t, unsigned& low, unsigned& high) {
  asm("{\n"
      "  .reg .b16 first, second;\n"
      "  mov.b32 {first, second}, %2;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "  cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}
#else
// Exponent and mantissa are moved into place, and 2^8 makes up for the other bias.
WL_FN unsigned widen_pair_to_half(unsigned pair) {  // in bytes 0 and 2
  const unsigned magnitude = pair & 0x007f007fu;
  unsigned scaled;
  asm("mul.rn.f16x2 %0, %1, %2;"
      : "=r"(scaled)
      : "r"(magnitude << 7 | (pair & 0x00800080u) << 8), "r"(0x5c005c00u));
  const unsigned is_nan = (magnitude + 0x00010001u) & 0x00800080u;
  return scaled | is_nan * 0xfcu;
}
WL_FN void widen_to_half(unsigned bytes, e4m3_t, unsigned& low, unsigned& high) {
  low = widen_pair_to_half(__byte_perm(bytes, 0, 0x4140));
  high = widen_pair_to_half(__byte_perm(bytes, 0, 0x4342));
}
#endif

WL_FN unsigned half_to_bfloat16(unsigned pair) {
  unsigned result;
  asm("{\n"
      "  .reg .b16 first, second;\n"
      "  .reg .f32 x, y;\n"
      "  mov.b32 {first, second}, %1;\n"
      "  cvt.f32.f16 x, first;\n"
      "  cvt.f32.f16 y, second;\n"
      "  cvt.rn.bf16x2.f32 %0, y, x;\n"
      "}\n"
      : "=r"(result)
      : "r"(pair));
  return result;
}

// The same as pairs of another type; exact, too.
template <class Narrow>
WL_FN void widen(unsigned bytes, half_t, unsigned& low, unsigned& high) {
  widen_to_half(bytes, Narrow{}, low, high);
}
template <class Narrow>
WL_FN void widen(unsigned bytes, bfloat16_t, unsigned& low, unsigned& high) {
  widen_to_half(bytes, Narrow{}, low, high);
  low = half_to_bfloat16(low);
  high = half_to_bfloat16(high);
}

}  // namespace warploom
