// Float functions a functor may call, on the special function unit (MUFU) where it is accurate
// enough. namespace precise holds the slower ones of CUDA's library.
#pragma once

#include <warploom/device/qualifiers.cuh>

#include <warploom/integer_math.hpp>

namespace warploom {

WL_FN float abs(float x) { return ::fabsf(x); }
WL_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
// Of NaN and a number NaN, as in torch and NumPy; fminf and fmaxf would drop it.
WL_FN float min(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
WL_FN float max(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
WL_FN float floor(float x) { return ::floorf(x); }
WL_FN float ceil(float x) { return ::ceilf(x); }

// Toward zero; numbers beyond 32 bits become the largest or smallest, NaN becomes 0.
WL_FN int to_int(float x) { return __float2int_rz(x); }

// The product that exponents are taken from must not be below the exact one: of logits around 1e10
// what rounding leaves is hundreds, and an exponential of that is infinite.
WL_FN float product_rounded_up(float a, float b) { return __fmul_ru(a, b); }

WL_FN float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WL_FN float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WL_FN float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WL_FN float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WL_FN float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

WL_FN float exp(float x) { return exp2(x * kLog2e); }
WL_FN float log(float x) { return log2(x) * kLn2; }
WL_FN float sigmoid(float x) { return reciprocal(1.0f + exp(-x)); }

// One MUFU operation, off by 2^-11 of its value: as much as rounding logits to 16 bits would be.
WL_FN float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Nearest angle to 0, by two-part 2 pi (Cody and Waite); exact to float precision up to 1e6. Adding
// 1.5 * 2^23 rounds to whole numbers by an ordinary addition, and conversions are rare units' work.
WL_FN float reduce_angle(float x) {
  const float n = ::fmaf(x, 0.15915494309189535f, 12582912.0f) - 12582912.0f;
  return ::fmaf(-n, -1.7484555e-7f, ::fmaf(-n, 6.2831855f, x));
}
// Intrinsics and not asm: two lanes that turn by the same angle share its sine and cosine.
WL_FN float sin(float x) { return ::__sinf(reduce_angle(x)); }
WL_FN float cos(float x) { return ::__cosf(reduce_angle(x)); }

WL_FN float pow(float x, float y) { return ::powf(x, y); }
WL_FN float fmod(float a, float b) { return ::fmodf(a, b); }

WL_FN float bits_to_float(int bits) { return __int_as_float(bits); }
WL_FN int float_to_bits(float value) { return __float_as_int(value); }
WL_FN float nearest_whole(float x) { return ::rintf(x); }
WL_FN float with_sign_of(float size, float x) { return ::copysignf(size, x); }

}  // namespace warploom

#include <warploom/float_math.hpp>

namespace warploom {

// pi / 2 in three parts (Cody and Waite): exact to float precision up to 1e6.
WL_FN float tan(float x) {
  const float n = nearest_whole(x * 0.63661977f);
  const float rest =
      ::fmaf(-n, -1.7151245e-15f, ::fmaf(-n, -4.371139e-8f, ::fmaf(-n, 1.5707964f, x)));
  return tan_of_rest(rest, (int(n) & 1) != 0);
}

namespace precise {
WL_FN float log1p(float x) { return ::log1pf(x); }
WL_FN float expm1(float x) { return ::expm1f(x); }
WL_FN float tan(float x) { return ::tanf(x); }
WL_FN float atan(float x) { return ::atanf(x); }
WL_FN float sinh(float x) { return ::sinhf(x); }
WL_FN float cosh(float x) { return ::coshf(x); }
WL_FN float exp(float x) { return ::expf(x); }
WL_FN float exp2(float x) { return ::exp2f(x); }
WL_FN float log(float x) { return ::logf(x); }
WL_FN float log2(float x) { return ::log2f(x); }
WL_FN float sqrt(float x) { return ::sqrtf(x); }
WL_FN float rsqrt(float x) { return ::rsqrtf(x); }
WL_FN float tanh(float x) { return ::tanhf(x); }
WL_FN float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }
WL_FN float sin(float x) { return ::sinf(x); }
WL_FN float cos(float x) { return ::cosf(x); }
WL_FN float erf(float x) { return ::erff(x); }
using warploom::abs;
using warploom::ceil;
using warploom::floor;
using warploom::floordiv;
using warploom::fmod;
using warploom::max;
using warploom::min;
using warploom::mod;
using warploom::pow;
}  // namespace precise

}  // namespace warploom
