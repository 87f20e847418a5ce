// Storage types of 8-bit and 16-bit floats, and loads that give the types a functor computes with.
#pragma once

#include <warploom/math.hpp>

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
WL_FN float to_float(bfloat16_t value) { return bits_to_float(int(unsigned(value.bits) << 16)); }
WL_FN float to_float(half_t value) {
  // Put exponent and mantissa in place and rescale, which also makes denormals right.
  const unsigned magnitude = (value.bits & 0x7fffu) << 13;
  const unsigned sign = (value.bits & 0x8000u) << 16;
  const float scaled = bits_to_float(int(magnitude)) * 5.19229686e33f;  // 2^112
  const float special = bits_to_float(int(magnitude | 0x7f800000u));    // infinity or NaN
  const float result = magnitude >= 0x0f800000u ? special : scaled;
  return bits_to_float(int(unsigned(float_to_bits(result)) | sign));
}

// Rounds to nearest, ties to even.
template <class T>
WL_FN T from_float(float value);
template <>
WL_FN float from_float<float>(float value) {
  return value;
}
template <>
WL_FN bfloat16_t from_float<bfloat16_t>(float value) {
  const unsigned bits = unsigned(float_to_bits(value));
  const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<unsigned short>((is_nan ? bits | 0x00400000u : rounded) >> 16)};
}
template <>
WL_FN half_t from_float<half_t>(float value) {
  const unsigned bits = unsigned(float_to_bits(value));
  const unsigned sign = (bits >> 16) & 0x8000u;
  const unsigned size = bits & 0x7fffffffu;
  // Normal results: rebias the exponent and round. Denormal ones: let an addition do the rounding.
  const unsigned normal = (size - 0x38000000u + 0x0fffu + ((size >> 13) & 1u)) >> 13;
  const unsigned denormal = unsigned(float_to_bits(bits_to_float(int(size)) + 0.5f)) - 0x3f000000u;
  const unsigned finite = size < 0x38800000u ? denormal : normal;
  const unsigned overflow = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {static_cast<unsigned short>(sign | (size >= 0x477ff000u ? overflow : finite))};
}

WL_FN float load(const float* p, long long offset) { return p[offset]; }
WL_FN float load(const half_t* p, long long offset) { return to_float(p[offset]); }
WL_FN float load(const bfloat16_t* p, long long offset) { return to_float(p[offset]); }
WL_FN int load(const long long* p, long long offset) { return int(p[offset]); }
WL_FN int load(const int* p, long long offset) { return p[offset]; }
WL_FN int load(const short* p, long long offset) { return p[offset]; }
WL_FN int load(const signed char* p, long long offset) { return p[offset]; }
WL_FN int load(const unsigned char* p, long long offset) { return p[offset]; }
WL_FN bool load(const bool* p, long long offset) { return p[offset]; }

}  // namespace warploom
