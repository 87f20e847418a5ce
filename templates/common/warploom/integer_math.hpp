// Integer functions a functor may call, with Python's meaning, in 32 bits and (for tile analysis)
// in 64. Included by math.cuh and math.hpp, which define WL_FN.
#pragma once

namespace warploom {

using wide = long long;

// A result that overflows keeps its low bits: signed overflow would be undefined. As in NumPy, the
// negation of the smallest number is that number.
WL_FN int wrapped_sum(int a, int b) { return int(unsigned(a) + unsigned(b)); }
WL_FN int wrapped_difference(int a, int b) { return int(unsigned(a) - unsigned(b)); }
WL_FN int wrapped_product(int a, int b) { return int(unsigned(a) * unsigned(b)); }
WL_FN int negated(int a) { return int(0u - unsigned(a)); }
WL_FN wide negated(wide a) { return wide(0ull - (unsigned long long)(a)); }

// An int converted to a smaller type: its low bits.
template <class T>
WL_FN T wrap_uint8(T a) {
  return T(static_cast<unsigned char>(a));
}
template <class T>
WL_FN T wrap_int8(T a) {
  return T(static_cast<signed char>(a));
}
template <class T>
WL_FN T wrap_int16(T a) {
  return T(static_cast<short>(a));
}

// Shifts by any count, also by more bits than the type has, and of negative numbers.
WL_FN int shl(int a, int b) { return unsigned(b) < 32u ? int(unsigned(a) << b) : 0; }
WL_FN wide shl(wide a, wide b) {
  return (unsigned long long)(b) < 64u ? wide((unsigned long long)(a) << b) : 0;
}
WL_FN int shr(int a, int b) { return a >> (unsigned(b) < 32u ? b : 31); }
WL_FN wide shr(wide a, wide b) { return a >> ((unsigned long long)(b) < 64u ? b : 63); }

// Divisors that the host traps on, also in a branch not taken: 0, and -1 under the least number.
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

WL_FN int floordiv(int a, int b) { return floor_division(a, b); }
WL_FN wide floordiv(wide a, wide b) { return floor_division(a, b); }
WL_FN int mod(int a, int b) { return floor_remainder(a, b); }
WL_FN wide mod(wide a, wide b) { return floor_remainder(a, b); }
WL_FN int abs(int a) { return a < 0 ? negated(a) : a; }
WL_FN wide abs(wide a) { return a < 0 ? negated(a) : a; }
WL_FN int min(int a, int b) { return a < b ? a : b; }
WL_FN wide min(wide a, wide b) { return a < b ? a : b; }
WL_FN int max(int a, int b) { return a < b ? b : a; }
WL_FN wide max(wide a, wide b) { return a < b ? b : a; }

// Nearest index inside a tensor of `size` elements: padded rows and columns must read something.
WL_FN int clamp_index(int index, int size) { return max(min(index, size - 1), 0); }
WL_FN wide clamp_index(wide index, int size) { return max(min(index, wide(size) - 1), wide(0)); }

}  // namespace warploom
