// What the attention kernels use of CUDA beyond barriers and shuffles, on fibers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_on_fibers.hpp"

struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static void __syncwarp() { fibers::wait_for_warp(); }
static bool __any_sync(unsigned, bool value) {
  return fibers::reduce(value, [](bool a, bool b) { return a || b; });
}
static bool __all_sync(unsigned, bool value) {
  return fibers::reduce(value, [](bool a, bool b) { return a && b; });
}
static int __reduce_min_sync(unsigned, int value) {
  return fibers::reduce(value, [](int a, int b) { return a < b ? a : b; });
}
static int __reduce_max_sync(unsigned, int value) {
  return fibers::reduce(value, [](int a, int b) { return a < b ? b : a; });
}
static float __fmul_ru(float a, float b) {
  const double exact = double(a) * b;
  const float rounded = float(exact);
  return rounded < exact ? std::nextafter(rounded, INFINITY) : rounded;
}
static float __fadd_ru(float a, float b) {
  const double exact = double(a) + b;
  const float rounded = float(exact);
  return rounded < exact ? std::nextafter(rounded, INFINITY) : rounded;
}
static float __fmaf_rd(float a, float b, float c) {
  const double exact = double(a) * b + c;
  const float rounded = float(exact);
  return rounded > exact ? std::nextafter(rounded, -INFINITY) : rounded;
}
static unsigned __ballot_sync(unsigned, bool value) {
  const unsigned mine = value ? 1u << fibers::running % 32 : 0u;
  return fibers::reduce(mine, [](unsigned a, unsigned b) { return a | b; });
}
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __ffs(int value) { return __builtin_ffs(value); }

static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
static float __int_as_float(int bits) { return __uint_as_float(unsigned(bits)); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(bytes >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}

template <class T>
static T __ldg(const T* from) {
  return *from;
}
template <class T>
static T __ldcg(const T* from) {
  return *from;
}
static void __threadfence() {}
static unsigned atomicAdd(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to += value;
  return before;
}
static long long clock64() {
  static long long cycles = 0;
  return cycles += 1 << 12;
}
// Where CTAs follow each other, who waits for the next ones waits in vain.
static void __nanosleep(unsigned) { fibers::cta->yield(); }
static void __trap() { __builtin_trap(); }
