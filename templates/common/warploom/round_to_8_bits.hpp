// Rounding to 8 bits: to nearest, ties to even. Numbers that are too large become the largest
// number, since e4m3 has no infinity and a cache has no use for one. NaN stays NaN, and becomes 0
// in int8. Included after load.cuh or load.hpp, which have the types.
#pragma once

namespace warploom {

// Bits of a type with this mantissa, bias of the exponent, and largest number (as a float's bits).
// Subnormals are rounded by an addition: the last place of `magic` is the smallest of them.
template <int kMantissa, int kBias, unsigned kLargest>
WL_FN unsigned char round_to_8_bits(float value, unsigned nan) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  const unsigned sign = bits >> 24 & 0x80u;
  unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<unsigned char>(sign | nan);
  magnitude = magnitude < kLargest ? magnitude : kLargest;
  constexpr int kDropped = 23 - kMantissa;
  constexpr unsigned kSmallestNormal = unsigned(128 - kBias) << 23;
  constexpr unsigned kMagic = unsigned(127 + 1 - kBias - kMantissa + 23) << 23;
  const float magic = __builtin_bit_cast(float, kMagic);
  const unsigned subnormal =
      __builtin_bit_cast(unsigned, __builtin_bit_cast(float, magnitude) + magic) - kMagic;
  const unsigned odd = magnitude >> kDropped & 1u;
  const unsigned rounded = (magnitude + (1u << (kDropped - 1)) - 1u + odd) >> kDropped;
  const unsigned normal = rounded - (unsigned(127 - kBias) << kMantissa);
  return static_cast<unsigned char>(sign | (magnitude < kSmallestNormal ? subnormal : normal));
}

template <>
WL_FN e4m3_t from_float<e4m3_t>(float value) {
  return {round_to_8_bits<3, 7, 0x43e00000u>(value, 0x7fu)};  // 448
}
template <>
WL_FN e5m2_t from_float<e5m2_t>(float value) {
  return {round_to_8_bits<2, 15, 0x47600000u>(value, 0x7fu)};  // 57344
}
template <>
WL_FN i8_t from_float<i8_t>(float value) {
  const float above = value > -128.0f ? value : value <= -128.0f ? -128.0f : 0.0f;
  const float limited = above < 127.0f ? above : 127.0f;
  // the addition rounds: the last place of 1.5 * 2^23 is 1
  return {static_cast<signed char>(__builtin_bit_cast(int, limited + 12582912.0f) - 0x4b400000)};
}

}  // namespace warploom
