// Integer functions a functor may call, with Python's meaning, in 32 bits and (for tile analysis)
// in 64. Included by math.cuh and math.hpp, which define WL_FN.
#pragma once

namespace warploom {

using wide = long long;

// a without overflow: the smallest number stays as it is, as in NumPy.
WL_FN int negated(int a) { return int(0u - unsigned(a)); }
WL_FN wide negated(wide a) { return wide(0ull - (unsigned long long)(a)); }

// What the host would trap on, also in a branch not taken: zero, and -1 below the smallest number.
template <class T>
WL_FN bool is_unsafe_divisor(T b) {
  return (b == 0) | (b == -1);
}

template <class T>
WL_FN T floor_division(T a, T b) {
  const bool is_unsafe = is_unsafe_divisor(b);
  const T divisor = is_unsafe ? T(1) : b;
  const T quotient = a / divisor;
  const T remainder = a % divisor;
  const bool is_below = (remainder != 0) & ((remainder < 0) != (divisor < 0));
  if (is_unsafe) return b == 0 ? T(0) : negated(a);  // division by zero gives 0, as in NumPy
  return quotient - T(is_below);
}

template <class T>
WL_FN T floor_remainder(T a, T b) {
  const bool is_unsafe = is_unsafe_divisor(b);
  const T divisor = is_unsafe ? T(1) : b;
  const T remainder = a % divisor;
  const bool is_below = (remainder != 0) & ((remainder < 0) != (divisor < 0));
  return is_unsafe ? T(0) : remainder + (is_below ? divisor : T(0));
}

template <class T>
WL_FN T integer_power(T base, T exponent) {
  T result = exponent < 0 ? T(0) : T(1);
  for (T left = exponent; left > 0; left >>= 1, base *= base) result *= (left & 1) ? base : T(1);
  return result;
}

WL_FN int floordiv(int a, int b) { return floor_division(a, b); }
WL_FN wide floordiv(wide a, wide b) { return floor_division(a, b); }
WL_FN int mod(int a, int b) { return floor_remainder(a, b); }
WL_FN wide mod(wide a, wide b) { return floor_remainder(a, b); }
WL_FN int pow(int a, int b) { return integer_power(a, b); }
WL_FN wide pow(wide a, wide b) { return integer_power(a, b); }
WL_FN int abs(int a) { return a < 0 ? -a : a; }
WL_FN wide abs(wide a) { return a < 0 ? -a : a; }
WL_FN int min(int a, int b) { return a < b ? a : b; }
WL_FN wide min(wide a, wide b) { return a < b ? a : b; }
WL_FN int max(int a, int b) { return a < b ? b : a; }
WL_FN wide max(wide a, wide b) { return a < b ? b : a; }

// Nearest index inside a tensor of `size` elements: padded rows and columns must read something.
WL_FN int clamp_index(int index, int size) { return max(min(index, size - 1), 0); }
WL_FN wide clamp_index(wide index, int size) { return max(min(index, wide(size) - 1), wide(0)); }

}  // namespace warploom
