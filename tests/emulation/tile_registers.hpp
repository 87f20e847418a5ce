// AMX's tile registers, and what CPU kernels use of AVX-512 beside them, as Intel's manual
// (Software Developer's Manual, volume 2) has it, for processors with AVX2: included before
// kernels, whose headers then believe that the processor has both. Denormal numbers are not
// flushed.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1

namespace emulated {

using Word = std::uint32_t;
typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

// The second and the first number of a pair of bfloat16.
inline float second_of(Word pair) {
  const Word bits = pair & 0xffff0000u;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float first_of(Word pair) { return second_of(pair << 16); }
inline Word to_bfloat16(float value) {  // to the nearest, ties to even
  Word bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 64;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Calls f(lane) for each lane.
template <class F>
inline Floats lanes(F f) {
  Floats all;
  for (int i = 0; i < 16; ++i) all[i] = f(i);
  return all;
}
inline Floats fmadd(Floats a, Floats b, Floats c) {
  return lanes([&](int i) { return std::fma(a[i], b[i], c[i]); });
}
inline Floats max(Floats a, Floats b) {
  return lanes([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
// vdpbf16ps: one sum, to which the second product is added before the first.
inline Floats dot(Floats sum, Ints a, Ints b) {
  return lanes([&](int i) {
    const float half = std::fma(second_of(a[i]), second_of(b[i]), sum[i]);
    return std::fma(first_of(a[i]), first_of(b[i]), half);
  });
}
// vreduceps to whole numbers below, vcmpps (not less than) and vscalefps.
inline Floats above_floor(Floats x) {
  return lanes([&](int i) { return std::isinf(x[i]) ? 0.0f : x[i] - std::floor(x[i]); });
}
inline unsigned not_less(Floats x, float limit) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= unsigned(!(x[i] < limit)) << i;
  return mask;
}
inline Floats scale(unsigned mask, Floats y, Floats x) {
  return lanes(
      [&](int i) { return mask >> i & 1 ? std::ldexp(y[i], int(std::floor(x[i]))) : 0.0f; });
}
inline Ints pairs(Floats second, Floats first) {
  std::uint16_t halves[32];
  for (int i = 0; i < 16; ++i) {
    halves[i] = to_bfloat16(first[i]);
    halves[16 + i] = to_bfloat16(second[i]);
  }
  Ints words;
  std::memcpy(&words, halves, sizeof words);
  return words;
}
inline Ints widen(Halves bits) {
  Ints words;
  for (int i = 0; i < 16; ++i) words[i] = bits[i];
  return words;
}
inline Floats from_float16(__m256i bits) {
  const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
                          _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  Floats all;
  std::memcpy(&all, parts, sizeof all);
  return all;
}
inline __m256i to_float16(Floats all) {
  __m256 parts[2];
  std::memcpy(parts, &all, sizeof all);
  return _mm256_set_m128i(_mm256_cvtps_ph(parts[1], 0), _mm256_cvtps_ph(parts[0], 0));
}

inline thread_local Word tile[8][16][16];

inline void load(int t, const void* from, long stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(tile[t][row], static_cast<const char*>(from) + row * stride, 64);
  }
}
inline void store(int t, void* to, long stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile[t][row], 64);
  }
}
inline void zero(int t) { std::memset(tile[t], 0, sizeof tile[t]); }
// tdpbf16ps: the products of first numbers have a sum, those of second ones another; both begin at
// zero, and what they come to is added to the tile.
inline void tile_dot(int c, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      float first = 0.0f, second = 0.0f, sum;
      for (int k = 0; k < 16; ++k) {
        first = std::fma(first_of(tile[a][m][k]), first_of(tile[b][k][n]), first);
        second = std::fma(second_of(tile[a][m][k]), second_of(tile[b][k][n]), second);
      }
      std::memcpy(&sum, &tile[c][m][n], sizeof sum);
      sum += first + second;
      std::memcpy(&tile[c][m][n], &sum, sizeof sum);
    }
  }
}
inline long grant(...) { return 0; }

}  // namespace emulated

#undef _mm512_cmp_ps_mask
#undef _mm512_reduce_ps
#undef _mm512_cvtps_ph
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _mm512_set1_ps(x) (x)
#define _mm512_fmadd_ps(a, b, c) (__m512) emulated::fmadd(a, b, c)
#define _mm512_max_ps(a, b) (__m512) emulated::max(a, b)
#define _mm512_dpbf16_ps(sum, a, b) \
  (__m512) emulated::dot(sum, (emulated::Ints)(a), (emulated::Ints)(b))
#define _mm512_reduce_ps(x, how) (__m512) emulated::above_floor(x)
#define _mm512_cmp_ps_mask(x, limit, how) emulated::not_less(x, limit)
#define _mm512_maskz_scalef_ps(mask, y, x) (__m512) emulated::scale(mask, y, x)
#define _mm512_cvtne2ps_pbh(second, first) emulated::pairs(second, first)
#define _mm512_cvtepu16_epi32(bits) emulated::widen((emulated::Halves)(bits))
#define _mm512_cvtph_ps(bits) (__m512) emulated::from_float16(bits)
#define _mm512_cvtps_ph(x, how) emulated::to_float16(x)
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero emulated::zero
#define _tile_dpbf16ps emulated::tile_dot
#define _tile_loadconfig(shapes) (void)(shapes)
#define _tile_release() (void)0
#define syscall emulated::grant
