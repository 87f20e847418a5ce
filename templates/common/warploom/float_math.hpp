// Float functions that both back ends compute alike: branch-free, within 5e-7 of their value, also
// where that is near 0. Included by math.cuh and math.hpp, which define WL_FN, abs, bits_to_float,
// exp, float_to_bits, floor, fma, fmod, nearest_whole, reciprocal and with_sign_of. Polynomials are
// least maximum relative error fits (Lawson's iteration) with the stated error.
#pragma once

namespace warploom {

// Tests on bits: compiler options that ignore infinities and NaN cannot remove them.
WL_FN bool is_nan(float x) { return (float_to_bits(x) & 0x7fffffff) > 0x7f800000; }
WL_FN bool is_inf(float x) { return (float_to_bits(x) & 0x7fffffff) == 0x7f800000; }

// % and // as in Python and NumPy; torch's % differs in the sign of a remainder of zero, which here
// is that of b. The remainder of fmod is exact, however large a / b is.
WL_FN bool is_of_other_sign(float rest, float b) {
  return (rest != 0.0f) & ((rest < 0.0f) != (b < 0.0f));
}
WL_FN float mod(float a, float b) {
  const float rest = fmod(a, b);
  const float of_zero = with_sign_of(0.0f, b);
  return rest == 0.0f ? of_zero : is_of_other_sign(rest, b) ? rest + b : rest;
}
WL_FN float floordiv(float a, float b) {
  const float rest = fmod(a, b);
  const float quotient = (a - rest) / b - (is_of_other_sign(rest, b) ? 1.0f : 0.0f);
  const float below = floor(quotient);
  const float whole = below + (quotient - below > 0.5f ? 1.0f : 0.0f);
  const float ratio = a / b;
  return b == 0.0f ? ratio : whole == 0.0f ? with_sign_of(0.0f, ratio) : whole;
}

// exp(x) is 2^n * (1 + less_one).
struct SplitExp {
  float n, less_one;
};
WL_FN SplitExp split_exp(float x) {
  const float n = nearest_whole(x * kLog2e);
  const float f = fma(n, 2.12194440e-4f, x - n * 0.693359375f);  // ln 2 in two parts
  float y = 0.0013888871762901545f;  // (exp(f) - 1) / f, |f| <= ln(2) / 2, error 1.3e-8
  y = fma(y, f, 0.008370512165129185f);
  y = fma(y, f, 0.04166717454791069f);
  y = fma(y, f, 0.16666492819786072f);
  y = fma(y, f, 0.4999999701976776f);
  y = fma(y, f, 1.0f);
  return {n, y * f};
}
// For n from -126 to 127; 128 is infinity.
WL_FN float power_of_two(float n) { return bits_to_float(int(unsigned(int(n) + 127) << 23)); }

WL_FN float expm1(float x) {
  const float low = x < -18.0f ? -18.0f : x;
  const SplitExp parts = split_exp(low > 88.9f ? 88.9f : low);
  const float half = power_of_two(parts.n - 1.0f);  // 2^128 would overflow
  return 2.0f * fma(half, parts.less_one, half - 0.5f);
}

// exp(x) / 2 for x >= 0: finite also where exp(x) just overflows.
WL_FN float half_exp(float x) {
  const SplitExp parts = split_exp(x > 89.7f ? 89.7f : x);
  const float quarter = power_of_two(parts.n - 2.0f);
  return 2.0f * fma(quarter, parts.less_one, quarter);
}
WL_FN float cosh(float x) {
  const float half = half_exp(abs(x));
  return half + 0.25f / half;
}
WL_FN float sinh(float x) {
  const float size = abs(x), x2 = x * x;
  float y = 0.00020405078248586506f;  // sinh(x) / x, |x| <= 1, error 2.3e-8
  y = fma(y, x2, 0.008329774253070354f);
  y = fma(y, x2, 0.1666673719882965f);
  y = fma(y, x2, 1.0f);
  const float half = half_exp(size);
  return size < 1.0f ? y * x : with_sign_of(half - 0.25f / half, x);
}

// Near 0 a polynomial, elsewhere formula 7.1.26 of Abramowitz and Stegun: absolute error 1.5e-7.
WL_FN float erf(float x) {
  const float size = abs(x), x2 = x * x;
  float near = -0.0005631425301544368f;  // erf(x) / x, |x| <= 1, error 4e-8
  near = fma(near, x2, 0.0049175540916621685f);
  near = fma(near, x2, -0.026711316779255867f);
  near = fma(near, x2, 0.11280180513858795f);
  near = fma(near, x2, -0.37612324953079224f);
  near = fma(near, x2, 1.1283791065216064f);
  const float t = reciprocal(fma(0.3275911f, size, 1.0f));
  float far = 1.061405429f;
  far = fma(far, t, -1.453152027f);
  far = fma(far, t, 1.421413741f);
  far = fma(far, t, -0.284496736f);
  far = fma(far, t, 0.254829592f);
  far = fma(-far * t, exp(-x2), 1.0f);
  return size < 1.0f ? near * x : with_sign_of(far, x);
}

// 1 + x = (1 + m) * 2^e with m in [-1/4, 1/2]; log(1 + m) = 2 atanh(m / (2 + m)). Adding 1 may
// round x away, but e may be approximate: m keeps x's digits.
WL_FN float log1p(float x) {
  const bool is_far = x > 1e18f;  // adding 1 changes nothing, and 2^-e might be subnormal
  const float near = is_far ? x * 2.3283064365386963e-10f : x;                  // 2^-32
  const int e = int(unsigned(float_to_bits(1.0f + near)) - 0x3f400000u) >> 23;  // of 3/4
  const float unit = power_of_two(float(-e));
  const float m = fma(near, unit, unit - 1.0f);
  const float s = m / (2.0f + m), s2 = s * s;
  float y = 0.3043980896472931f;  // 2 atanh(s) / s, |s| <= 1/5, error 2.5e-9
  y = fma(y, s2, 0.3995243012905121f);
  y = fma(y, s2, 0.6666705012321472f);
  y = fma(y, s2, 2.0f);
  const float found = fma(float(is_far ? e + 32 : e), kLn2, y * s);
  const float above = x < kInfinity ? found : x;
  const float below = x == -1.0f ? -kInfinity : kNaN;
  return x <= -1.0f ? below : above;
}

WL_FN float atan(float x) {
  const float size = abs(x);
  const bool is_steep = size > 1.0f;
  const float t = is_steep ? 1.0f / size : size;
  const float t2 = t * t;
  float y = 0.0028498878236860037f;  // atan(t) / t, 0 <= t <= 1, error 1.6e-8
  y = fma(y, t2, -0.016068624332547188f);
  y = fma(y, t2, 0.04269151762127876f);
  y = fma(y, t2, -0.07504294812679291f);
  y = fma(y, t2, 0.10640934109687805f);
  y = fma(y, t2, -0.14203645288944244f);
  y = fma(y, t2, 0.1999261975288391f);
  y = fma(y, t2, -0.3333307206630707f);
  y = fma(y, t2, 1.0f);
  return with_sign_of(is_steep ? fma(-y, t, 1.57079632679489656f) : y * t, x);
}

// Tangent of an angle: `rest` plus a multiple of pi / 2, which may be odd.
WL_FN float tan_of_rest(float rest, bool is_odd) {
  const float r2 = rest * rest;
  float y = 0.005616551265120506f;  // tan(r) / r, |r| <= 1.09 pi / 4, error 6e-9
  y = fma(y, r2, -0.0026351367123425007f);
  y = fma(y, r2, 0.013179606758058071f);
  y = fma(y, r2, 0.020286377519369125f);
  y = fma(y, r2, 0.05427616089582443f);
  y = fma(y, r2, 0.13330435752868652f);
  y = fma(y, r2, 0.333334356546402f);
  y = fma(y, r2, 1.0f);
  const float tangent = y * rest;
  return is_odd ? -1.0f / tangent : tangent;
}

}  // namespace warploom
