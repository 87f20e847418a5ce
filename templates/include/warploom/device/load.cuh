// Storage types of 8-bit and 16-bit floats, loads that give the types a functor computes with, and
// a store.
// The types are bits only, so that this header needs no other; CuTe's have the same layout.
#pragma once

#include <warploom/device/math.cuh>

namespace warploom {

struct half_t {
  unsigned short bits;
};
struct bfloat16_t {
  unsigned short bits;
};
struct e4m3_t {  // no infinities; NaN where all bits below the sign are set
  unsigned char bits;
};
struct e5m2_t {  // the upper half of a half_t
  unsigned char bits;
};
struct i8_t {  // an integer; what it stands for is a scale times it
  signed char bits;
};

WL_FN float to_float(float value) { return value; }
WL_FN float to_float(bfloat16_t value) { return __uint_as_float(unsigned(value.bits) << 16); }
WL_FN float to_float(half_t value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

WL_FN float to_float(e5m2_t value) {
  return to_float(half_t{static_cast<unsigned short>(value.bits << 8)});
}
WL_FN float to_float(e4m3_t value) {
  const unsigned magnitude = value.bits & 0x7fu, sign = (value.bits & 0x80u) << 8;
  const unsigned bits = magnitude == 0x7fu ? 0x7e00u : magnitude << 7 | sign;
  return 256.0f * to_float(half_t{static_cast<unsigned short>(bits)});  // the biases differ by 8
}
WL_FN float to_float(i8_t value) { return float(value.bits); }

// Rounds to nearest, ties to even.
template <class T>
WL_FN T from_float(float value);
template <>
WL_FN float from_float<float>(float value) {
  return value;
}
template <>
WL_FN bfloat16_t from_float<bfloat16_t>(float value) {
  bfloat16_t result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
WL_FN half_t from_float<half_t>(float value) {
  half_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// A kernel never writes what its functors read, so the read-only path is right.
WL_FN float load(const float* p, long long offset) { return __ldg(p + offset); }
WL_FN float load(const half_t* p, long long offset) {
  return to_float(half_t{__ldg(&p[offset].bits)});
}
WL_FN float load(const bfloat16_t* p, long long offset) {
  return to_float(bfloat16_t{__ldg(&p[offset].bits)});
}
WL_FN int load(const long long* p, long long offset) { return int(__ldg(p + offset)); }
WL_FN int load(const int* p, long long offset) { return __ldg(p + offset); }
WL_FN int load(const short* p, long long offset) { return __ldg(p + offset); }
WL_FN int load(const signed char* p, long long offset) { return __ldg(p + offset); }
WL_FN int load(const unsigned char* p, long long offset) { return __ldg(p + offset); }
WL_FN bool load(const bool* p, long long offset) {
  return __ldg(reinterpret_cast<const unsigned char*>(p) + offset) != 0;
}

// 16 bytes at once, which compilers may else take to pieces again.
WL_FN void store_words(void* to, const uint4& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

}  // namespace warploom
