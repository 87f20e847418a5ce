// Vectors of the machine's native width, by compiler vector extensions: the same text is AVX-512,
// AVX, SSE or NEON. Only what an extension cannot say is written with intrinsics, in headers named
// after them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define WL_LANES 16
#elif defined(__AVX__)
#define WL_LANES 8
#else
#define WL_LANES 4
#endif

// Small loops over register arrays must disappear: an array indexed at run time lives in memory.
#define WL_UNROLL _Pragma("GCC unroll 32")
#define WL_INLINE inline __attribute__((always_inline))
#define WL_LAMBDA_INLINE __attribute__((always_inline))

namespace warploom {

inline constexpr int kLanes = WL_LANES;

// Registers that hold accumulators decide the micro-kernel: 6 x 4 vectors fill 32, 6 x 2 fill 16.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kMicroVectors = 4;
#else
inline constexpr int kMicroVectors = 2;
#endif
inline constexpr int kMicroRows = 6;
inline constexpr int kPanel = kMicroVectors * kLanes;  // columns of a packed panel

typedef float Vec __attribute__((vector_size(4 * WL_LANES)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * WL_LANES)));
typedef std::uint32_t UintVec __attribute__((vector_size(4 * WL_LANES)));
typedef std::uint16_t HalfBits __attribute__((vector_size(2 * WL_LANES)));
typedef std::uint8_t ByteBits __attribute__((vector_size(WL_LANES)));

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int min_int(int a, int b) { return a < b ? a : b; }
constexpr int max_int(int a, int b) { return a > b ? a : b; }

template <class V>
WL_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

// The first `bytes` of a vector, the rest zero: never reads past the end of a row.
template <class V>
WL_INLINE V load_part(const void* p, int bytes) {
  V v = {};
  std::memcpy(&v, p, static_cast<std::size_t>(bytes));
  return v;
}

template <class V>
WL_INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// Its first `bytes`. A whole vector is a single store, where compilers do not know that it is
// whole.
template <class V>
WL_INLINE void store_part(void* p, V v, int bytes) {
  if (bytes == static_cast<int>(sizeof(V))) return store_as(p, v);
  std::memcpy(p, &v, static_cast<std::size_t>(bytes));
}

WL_INLINE Vec load_vec(const float* p) { return load_as<Vec>(p); }
WL_INLINE void store_vec(float* p, Vec v) { store_as(p, v); }

// Minus zero keeps every bit, so the compiler turns this into one broadcast.
WL_INLINE Vec broadcast(float x) { return x - Vec{}; }
WL_INLINE IntVec broadcast(std::int32_t x) { return x - IntVec{}; }

// a * b + c, rounded once where the machine can: compilers are told not to fuse by themselves.
WL_INLINE Vec fma_vec(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

WL_INLINE Vec max_vec(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);  // compilers make a compare and a blend of `?:`
#else
  return a > b ? a : b;
#endif
}

template <class Words, int... kIndex>
WL_INLINE Words shuffle(Words a, Words b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, IntVec{kIndex...});
#endif
}

template <int kBy, int... kIndex>
constexpr auto rotation(std::integer_sequence<int, kIndex...>) {
  return std::integer_sequence<int, ((kIndex + kBy) % kLanes)...>{};
}

// Folds a vector by halves; every lane gets the result.
template <int kWidth = kLanes / 2, class F>
WL_INLINE Vec fold(Vec v, F combine) {
  if constexpr (kWidth == 0) {
    return v;
  } else {
    constexpr auto kTurn = decltype(rotation<kWidth>(std::make_integer_sequence<int, kLanes>{})){};
    return fold<kWidth / 2>(combine(v, shuffle(v, v, kTurn)), combine);
  }
}

WL_INLINE Vec sum_lanes(Vec v) {
  return fold(v, [](Vec a, Vec b) WL_LAMBDA_INLINE { return a + b; });
}

WL_INLINE Vec max_lanes(Vec v) {
  return fold(v, [](Vec a, Vec b) WL_LAMBDA_INLINE { return max_vec(a, b); });
}

// 2^f for |f| <= 1/2, exactly 1 at 0: least maximum relative error.
WL_INLINE Vec exp2_of_fraction(Vec f) {
  Vec y = fma_vec(f, broadcast(1.327647199e-3f), broadcast(9.675541334e-3f));
  y = fma_vec(y, f, broadcast(5.550713273e-2f));
  y = fma_vec(y, f, broadcast(2.402211972e-1f));
  y = fma_vec(y, f, broadcast(6.931469671e-1f));
  return fma_vec(y, f, broadcast(1.0f));
}

// 2^x with relative error below 3e-7, exactly 1 at 0, and 0 below -126 (so -inf gives 0). x <= 127.
WL_INLINE Vec exp2_vec(Vec x) {
  const float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  Vec shifted = x + kShift;
  Vec y = exp2_of_fraction(x - (shifted - kShift));
  UintVec bits = (UintVec)y + ((UintVec)shifted << 23);  // far below -126 it wraps
  return x < -126.0f ? Vec{} : (Vec)bits;
}

}  // namespace warploom
