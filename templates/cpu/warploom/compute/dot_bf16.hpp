// The same arithmetic with AVX-512's bfloat16 dot product: a word is a pair of numbers, neighbours
// in the summed dimension; products are exact and sums are float32.
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define WL_HAS_DOT_BF16 1
#include <immintrin.h>

#include <warploom/storage.hpp>

namespace warploom {

struct DotBf16 {
  using Word = std::int32_t;
  using Words = IntVec;
  static constexpr int kPerWord = 2;
  static constexpr int kBlockRows = 4 * kMicroRows;
  static constexpr bool kInTiles = false;

  static WL_INLINE Vec step(Vec sum, Words a, Words b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  static WL_INLINE Words load_along(const bfloat16_t* row, int count) {
    return count == kLanes ? load_as<Words>(row) : load_part<Words>(row, 4 * count);
  }

  static WL_INLINE Words load_across(const bfloat16_t* const* rows, int column, int count) {
    UintVec low = widen_bits(bits(rows[0] + column, count));
    UintVec high = widen_bits(bits(rows[1] + column, count));
    return (Words)(low | high << 16);
  }

  // Weights keep 8 bits, so a relative error below 1.1e-4 does. It is exact at 0 and just below, so
  // that the largest weight is 1, whatever rounding leaves of its exponent. What lies below -126 is
  // 0 by the mask: denormal results cost a hundred cycles.
  static WL_INLINE Vec exp2(Vec x) {
    constexpr int kBelow = 1;  // what x has above the integer below it
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, kBelow);
    Vec y = fma_vec(f, broadcast(7.826797e-2f), broadcast(2.2630768e-1f));
    y = fma_vec(y, f, broadcast(6.954243e-1f));
    y = fma_vec(y, f, broadcast(1.0f));
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)x);
  }

  static WL_INLINE void store_pair(Word* out, Vec first, Vec second) {
    store_as(out, (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }

 private:
  static WL_INLINE HalfBits bits(const bfloat16_t* p, int count) {
    return count == kLanes ? load_as<HalfBits>(p) : load_part<HalfBits>(p, 2 * count);
  }
};

}  // namespace warploom
#endif
