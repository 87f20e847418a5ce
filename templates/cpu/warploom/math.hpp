// Float functions a functor may call, as branch-free code that compilers vectorise.
// The fast ones have an error below 5e-7, absolute, and relative where the value is above 1;
// namespace precise holds those of the C library.
#pragma once

#include <warploom/qualifiers.hpp>

#include <warploom/integer_math.hpp>

namespace warploom {

WL_FN float bits_to_float(int bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
WL_FN int float_to_bits(float value) {
  int bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

WL_FN float abs(float x) { return __builtin_fabsf(x); }
// a * b + c, rounded once where the machine has an instruction for it. Compilers are told not to
// fuse by themselves: which product of a sum of two they take differs from loop to loop.
WL_FN float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
// Of NaN and a number NaN, as in torch and NumPy.
WL_FN float min(float a, float b) { return (a < b) | (a != a) ? a : b; }
WL_FN float max(float a, float b) { return (a > b) | (a != a) ? a : b; }
WL_FN float floor(float x) { return __builtin_floorf(x); }
WL_FN float ceil(float x) { return __builtin_ceilf(x); }

// Toward zero; numbers beyond 32 bits become the largest or smallest, NaN becomes 0.
WL_FN int to_int(float x) {
  const float low = x < -2147483648.0f ? -2147483648.0f : x;
  const bool is_beyond = low >= 2147483648.0f;
  const int whole = int(is_beyond | (low != low) ? 0.0f : low);
  return is_beyond ? 2147483647 : whole;
}

// The product that exponents are taken from must not be below the exact one: of logits around 1e10
// what rounding leaves is hundreds, and an exponential of that is infinite.
WL_FN float product_rounded_up(float a, float b) {
  const double exact = double(a) * b;
  const float rounded = float(exact);
  return rounded < exact ? __builtin_nextafterf(rounded, kInfinity) : rounded;
}

WL_FN float sqrt(float x) { return __builtin_sqrtf(x); }
WL_FN float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

// 2 * mantissa * 2^(n - 1), so that n = 128 overflows to infinity and n = -126 flushes to zero:
// denormals are slow, and -infinity needs no special case.
WL_FN float scale_by_power_of_two(float twice_mantissa, float n) {
  return twice_mantissa * bits_to_float(int(unsigned(int(n) + 126) << 23));
}

// Polynomials here are least maximum relative error fits (Lawson's iteration) with the stated
// error.
WL_FN float exp2(float x) {
  const float low = x < -126.0f ? -126.0f : x;
  const float inside = low > 129.0f ? 129.0f : low;
  const float n = __builtin_rintf(inside);
  const float f = inside - n;  // -0.5 .. 0.5, error 9.2e-8
  float y = 0.001326472731307149f;
  y = fma(y, f, 0.009671512991189957f);
  y = fma(y, f, 0.05550733581185341f);
  y = fma(y, f, 0.24022242426872253f);
  y = fma(y, f, 0.6931470036506653f);
  y = fma(y, f, 1.0f);
  return scale_by_power_of_two(y + y, n);
}

WL_FN float exp(float x) {
  const float low = x < -87.336544f ? -87.336544f : x;
  const float inside = low > 89.4f ? 89.4f : low;
  const float n = __builtin_rintf(inside * kLog2e);
  const float f = fma(n, 2.12194440e-4f, inside - n * 0.693359375f);  // ln 2 in two parts
  float y = 0.008290229365229607f;  // |f| <= ln(2) / 2, error 9.2e-8
  y = fma(y, f, 0.04189838841557503f);
  y = fma(y, f, 0.16667640209197998f);
  y = fma(y, f, 0.49999144673347473f);
  y = fma(y, f, 0.9999997019767761f);
  y = fma(y, f, 1.0f);
  return scale_by_power_of_two(y + y, n);
}

// x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh((m - 1) / (m + 1)).
struct SplitLog {
  float exponent, log_mantissa;
};
WL_FN SplitLog split_log(float x) {
  const unsigned bits = unsigned(float_to_bits(x));  // it wraps for negative x, which has no log
  const int e = int(bits - 0x3f3504f3u) >> 23;       // 0x3f3504f3 is sqrt(1/2)
  const float m = bits_to_float(int(bits - (unsigned(e) << 23)));
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  float y = 2.0f / 9.0f;
  y = fma(y, s2, 2.0f / 7.0f);
  y = fma(y, s2, 2.0f / 5.0f);
  y = fma(y, s2, 2.0f / 3.0f);
  y = fma(y, s2, 2.0f);
  return {float(e), y * s};
}
// Zero, denormals (taken as zero), negative numbers, infinity and NaN.
WL_FN float log_of_special(float x, float log_x) {
  const float above = x < kInfinity ? log_x : x;
  const float below = x < 0.0f ? kNaN : -kInfinity;
  return x < 1.17549435e-38f ? below : above;
}
WL_FN float log(float x) {
  const SplitLog parts = split_log(x);
  return log_of_special(x, fma(parts.exponent, kLn2, parts.log_mantissa));
}
WL_FN float log2(float x) {
  const SplitLog parts = split_log(x);
  return log_of_special(x, fma(parts.log_mantissa, kLog2e, parts.exponent));
}

WL_FN float reciprocal(float x) { return 1.0f / x; }
WL_FN float sigmoid(float x) { return reciprocal(1.0f + exp(-x)); }

// sin of (angle - n pi) with the sign of n's parity. The reduction is in double, so that angles of
// 1e6 keep all digits a float has.
WL_FN float sin_of_double(double angle) {
  const double n = __builtin_rint(angle * 0.31830988618379067);
  const float f = float(angle - n * 3.14159265358979312);
  const float f2 = f * f;
  float y = 2.605750751172309e-06f;  // sin(f) / f, error 6.1e-9
  y = fma(y, f2, -0.0001980959059437737f);
  y = fma(y, f2, 0.00833306647837162f);
  y = fma(y, f2, -0.16666659712791443f);
  y = fma(y, f2, 1.0f);
  const double half = n * 0.5;
  const float sign = float(1.0 - 4.0 * (half - __builtin_floor(half)));  // 1 if n is even, else -1
  return sign * y * f;
}
WL_FN float sin(float x) { return sin_of_double(double(x)); }
WL_FN float cos(float x) { return sin_of_double(double(x) + 1.57079632679489656); }

WL_FN float pow(float x, float y) { return __builtin_powf(x, y); }

WL_FN float nearest_whole(float x) { return __builtin_rintf(x); }
WL_FN float with_sign_of(float size, float x) { return __builtin_copysignf(size, x); }

// Exact: doubles hold products of the divisor and 28 bits of a quotient, which has 276 at most.
// What rounding takes too much of is given back in the end.
WL_FN float fmod(float a, float b) {
  const double divisor = __builtin_fabs(double(b)), inverse = 1.0 / divisor;
  double rest = __builtin_fabs(double(a));
#pragma GCC unroll 10
  for (int i = 0; i < 10; ++i) {
    const double quotient = __builtin_trunc(rest * inverse);
    long long bits;
    __builtin_memcpy(&bits, &quotient, sizeof bits);
    bits &= ~0xffffffll;
    double leading;
    __builtin_memcpy(&leading, &bits, sizeof leading);
    rest = rest - leading * divisor;
  }
  rest = rest < 0.0 ? rest + divisor : rest;
  rest = rest >= divisor ? rest - divisor : rest;
  const bool is_whole = (abs(b) == kInfinity) & (abs(a) < kInfinity);
  return is_whole ? a : with_sign_of(float(rest), a);
}

}  // namespace warploom

#include <warploom/float_math.hpp>

namespace warploom {

WL_FN float tanh(float x) {
  const float t = expm1(-2.0f * abs(x));  // and not exp, whose digits near 1 say little of small x
  return with_sign_of(t / (2.0f + t), x);
}

// The first part of pi / 2 leaves products with whole numbers exact.
WL_FN float tan(float x) {
  const double angle = x;
  const double n = __builtin_rint(angle * 0.63661977236758134);
  const double rest = (angle - n * 1.5707963267341256) - n * 6.077100506506192e-11;
  const double half = n * 0.5;
  return tan_of_rest(float(rest), half != __builtin_floor(half));
}

namespace precise {
WL_FN float log1p(float x) { return __builtin_log1pf(x); }
WL_FN float expm1(float x) { return __builtin_expm1f(x); }
WL_FN float tan(float x) { return __builtin_tanf(x); }
WL_FN float atan(float x) { return __builtin_atanf(x); }
WL_FN float sinh(float x) { return __builtin_sinhf(x); }
WL_FN float cosh(float x) { return __builtin_coshf(x); }
WL_FN float exp(float x) { return __builtin_expf(x); }
WL_FN float exp2(float x) { return __builtin_exp2f(x); }
WL_FN float log(float x) { return __builtin_logf(x); }
WL_FN float log2(float x) { return __builtin_log2f(x); }
WL_FN float tanh(float x) { return __builtin_tanhf(x); }
WL_FN float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
WL_FN float sin(float x) { return __builtin_sinf(x); }
WL_FN float cos(float x) { return __builtin_cosf(x); }
WL_FN float erf(float x) { return __builtin_erff(x); }
using warploom::abs;
using warploom::ceil;
using warploom::floor;
using warploom::floordiv;
using warploom::fmod;
using warploom::max;
using warploom::min;
using warploom::mod;
using warploom::pow;
using warploom::rsqrt;
using warploom::sqrt;
}  // namespace precise

}  // namespace warploom
