// C = A B in register tiles. A is rows of words, B is packed in panels of kPanel columns, C is
// float32. One kernel serves Q K^T and P V, in float32 and in bfloat16 pairs (Goto and van de
// Geijn, 2008).
#pragma once

#include <type_traits>

#include <warploom/compute/simd.hpp>

namespace warploom {

// Left operand: `rows` rows of words, `stride` words apart. `usual` is how many rows such operands
// have as a rule. It may decide how products are summed, which `rows` may not: that depends on the
// chunk of a request at hand.
template <class Dot>
struct Rows {
  const typename Dot::Word* data;
  int stride;
  int rows;
  int usual;
};

// Right operand: panel j holds columns j * kPanel .. as [step][kPanel] words; panels lie `stride`
// words apart. Panels [begin, end) take part; only the first kTail vectors of panel `last` hold
// columns.
template <class Dot, int kTail>
struct Panels {
  const typename Dot::Word* data;
  int stride;
  int begin, end;
  int last;
};

// kRows x kVectors vectors of sums stay in registers over all steps; `done(row, column, sum)` takes
// them.
template <class Dot, int kRows, int kVectors, class Done>
WL_INLINE void matmul_tile(const typename Dot::Word* a, int a_stride, const typename Dot::Word* b,
                           int steps, Done done) {
  using Words = typename Dot::Words;
  Vec sum[kRows][kVectors] = {};
  for (int k = 0; k < steps; ++k) {
    Words column[kVectors];
    WL_UNROLL for (int n = 0; n < kVectors; ++n) {
      column[n] = load_as<Words>(b + k * kPanel + n * kLanes);
    }
    WL_UNROLL for (int m = 0; m < kRows; ++m) {
      Words row = broadcast(a[m * a_stride + k]);
      WL_UNROLL for (int n = 0; n < kVectors; ++n) sum[m][n] = Dot::step(sum[m][n], row, column[n]);
    }
  }
  WL_UNROLL for (int m = 0; m < kRows; ++m) {
    WL_UNROLL for (int n = 0; n < kVectors; ++n) done(m, n * kLanes, sum[m][n]);
  }
}

// Calls f with the row count of a micro tile as a constant; rows >= 1.
template <int kRows = kMicroRows, class F>
WL_INLINE void with_rows(int rows, F f) {
  if constexpr (kRows == 1) {
    f(std::integral_constant<int, 1>{});
  } else if (rows >= kRows) {
    f(std::integral_constant<int, kRows>{});
  } else {
    with_rows<kRows - 1>(rows, f);
  }
}

// One panel against all rows, so that the panel stays in the first-level cache.
template <class Dot, int kVectors, class Done>
WL_INLINE void matmul_panel(Rows<Dot> a, const typename Dot::Word* panel, int steps, Done done) {
  for (int row = 0; row < a.rows; row += kMicroRows) {
    with_rows(a.rows - row, [&](auto count) {
      matmul_tile<Dot, count, kVectors>(
          a.data + row * a.stride, a.stride, panel, steps,
          [&](int m, int column, Vec sum) { done(row + m, column, sum); });
    });
  }
}

// Calls `done(row, column, sum)` once for every vector of C.
template <class Dot, int kTail, class Done>
WL_INLINE void matmul(Rows<Dot> a, Panels<Dot, kTail> b, int steps, Done done) {
  for (int j = b.begin; j < b.end; ++j) {
    auto at_panel = [&](int row, int column, Vec sum) { done(row, j * kPanel + column, sum); };
    if (kTail == kMicroVectors || j < b.last) {
      matmul_panel<Dot, kMicroVectors>(a, b.data + j * b.stride, steps, at_panel);
    } else {
      matmul_panel<Dot, kTail>(a, b.data + j * b.stride, steps, at_panel);
    }
  }
}

// Stores C, whose rows lie `stride` apart.
template <class Dot, int kTail>
WL_INLINE void matmul_into(Rows<Dot> a, Panels<Dot, kTail> b, int steps, float* c, int stride) {
  matmul(a, b, steps, [&](int row, int column, Vec sum) WL_LAMBDA_INLINE {
    store_vec(c + row * stride + column, sum);
  });
}

}  // namespace warploom
