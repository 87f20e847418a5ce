// Storage types to float32 and back, a vector at a time; rounding is to nearest even.
#pragma once

#include <warploom/compute/simd.hpp>
#include <warploom/load.hpp>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace warploom {

// Zero-extends; written out where compilers split the conversion.
WL_INLINE UintVec widen_bits(HalfBits bits) {
#if defined(__AVX512F__)
  return (UintVec)_mm512_cvtepu16_epi32((__m256i)bits);
#else
  return __builtin_convertvector(bits, UintVec);
#endif
}

template <class Element>
struct Storage;

template <>
struct Storage<float> {
  using Bits = Vec;
  static WL_INLINE Vec widen(Bits bits) { return bits; }
  static WL_INLINE Bits round(Vec v) { return v; }
};

template <>
struct Storage<bfloat16_t> {
  using Bits = HalfBits;
  static WL_INLINE Vec widen(Bits bits) { return (Vec)(widen_bits(bits) << 16); }
  static WL_INLINE Bits round(Vec v) {
    UintVec u = (UintVec)v;
    UintVec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    UintVec nan = (u >> 16) | 0x40u;
    return __builtin_convertvector((UintVec)(v == v ? rounded : nan), Bits);
  }
};

#if defined(__AVX512F__)
WL_INLINE Vec widen_fp16(HalfBits bits) { return (Vec)_mm512_cvtph_ps((__m256i)bits); }
WL_INLINE HalfBits round_to_fp16(Vec v) {
  return (HalfBits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
WL_INLINE Vec widen_fp16(HalfBits bits) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
WL_INLINE HalfBits round_to_fp16(Vec v) {
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
#else
// Scaling by 2^112 moves the exponent and makes subnormals normal; infinity and NaN are set apart.
WL_INLINE Vec widen_fp16(HalfBits bits) {
  UintVec h = widen_bits(bits);
  UintVec magnitude = (h & 0x7fffu) << 13;
  UintVec finite = (UintVec)((Vec)magnitude * 0x1p112f);
  UintVec special = magnitude | 0x7f800000u;
  UintVec out = (UintVec)((h & 0x7c00u) == 0x7c00u ? special : finite);
  return (Vec)(out | ((h & 0x8000u) << 16));
}

WL_INLINE HalfBits round_to_fp16(Vec v) {
  UintVec u = (UintVec)v;
  UintVec magnitude = u & 0x7fffffffu;
  UintVec normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  UintVec subnormal = (UintVec)((Vec)magnitude + 0.5f) - 0x3f000000u;  // units of 2^-24
  UintVec out = (UintVec)(magnitude < 0x38800000u ? subnormal : normal);
  out = (UintVec)(magnitude >= 0x477ff000u ? UintVec{} + 0x7c00u : out);
  out = (UintVec)(magnitude > 0x7f800000u ? UintVec{} + 0x7e00u : out);
  return __builtin_convertvector(out | ((u >> 16) & 0x8000u), HalfBits);
}
#endif

template <>
struct Storage<half_t> {
  using Bits = HalfBits;
  static WL_INLINE Vec widen(Bits bits) { return widen_fp16(bits); }
  static WL_INLINE Bits round(Vec v) { return round_to_fp16(v); }
};

template <>
struct Storage<e4m3_t> {
  using Bits = ByteBits;
  static WL_INLINE Vec widen(Bits bits) {
    // Scaling by 2^120 moves the exponent and makes subnormals normal.
    UintVec x = __builtin_convertvector(bits, UintVec);
    UintVec magnitude = x & 0x7fu;
    UintVec finite = (UintVec)((Vec)(magnitude << 20) * 0x1p120f);
    UintVec out = (UintVec)(magnitude == 0x7fu ? UintVec{} + 0x7fc00000u : finite);
    return (Vec)(out | ((x & 0x80u) << 24));
  }
};

template <>
struct Storage<e5m2_t> {
  using Bits = ByteBits;
  static WL_INLINE Vec widen(Bits bits) {
    return widen_fp16(__builtin_convertvector(bits, HalfBits) << 8);
  }
};

template <>
struct Storage<i8_t> {
  using Bits = ByteBits;
  static WL_INLINE Vec widen(Bits bits) {
    UintVec shifted = __builtin_convertvector(bits ^ 0x80, UintVec);  // 128 more than the integer
    return __builtin_convertvector((IntVec)shifted - 128, Vec);
  }
};

// The first `count` of a vector's elements, the rest zero.
template <class Element>
WL_INLINE Vec load_floats(const Element* p, int count = kLanes) {
  using Bits = typename Storage<Element>::Bits;
  const int bytes = count * static_cast<int>(sizeof(Element));
  return Storage<Element>::widen(count == kLanes ? load_as<Bits>(p) : load_part<Bits>(p, bytes));
}

template <class Element>
WL_INLINE void store_floats(Element* p, Vec v, int count = kLanes) {
  store_part(p, Storage<Element>::round(v), count * static_cast<int>(sizeof(Element)));
}

}  // namespace warploom
