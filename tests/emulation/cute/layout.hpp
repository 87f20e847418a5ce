// What headers use of CuTe, on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace cute {

using std::is_same_v;
template <bool kFirst, class A, class B>
using conditional_t = std::conditional_t<kFirst, A, B>;

struct alignas(16) uint128_t {
  std::uint64_t low, high;
};

template <int>
struct Int;
using _1 = Int<1>;
using _16 = Int<16>;
using _64 = Int<64>;
using std::index_sequence;
using std::make_index_sequence;
template <class...>
struct Shape;
template <class...>
struct Stride;
template <class...>
struct Layout {};
template <int, int, int>
struct Swizzle {};

// Rows in panels, whose vectors of 8 are permuted by the lowest bits of the row.
template <int kRows, int kWidth, int kBits>
struct SwizzledPanels {
  int operator()(int row, int lane) const {
    const int at = row * kWidth + lane % kWidth + lane / kWidth * (kRows * kWidth);
    return at ^ (at >> 3 & ((1 << kBits) - 1) << 3);
  }
};
template <int kRows, int kWidth, int kPanels, int kBits, class Strides>
SwizzledPanels<kRows, kWidth, kBits> composition(
    Swizzle<kBits, 3, 3>, Layout<Shape<Int<kRows>, Shape<Int<kWidth>, Int<kPanels>>>, Strides>);

}  // namespace cute
