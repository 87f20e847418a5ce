// mma.sync of 16 rows, 8 columns and 16 terms: fp32 sums of products of 16-bit numbers.
#pragma once

#include <cute/layout.hpp>
#include <warploom/variant.hpp>

namespace cute {

template <class Element>
struct MultiplyBlocks {
  static void fma(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
                  unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    const unsigned lane = fibers::running % 32;
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    auto* const all = &fibers::cta->values[fibers::running - lane];
    all[lane] = reinterpret_cast<long long>(mine);
    fibers::wait_for_warp();
    const float before[4] = {c0, c1, c2, c3};
    float* const to[4] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
      const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
      float sum = before[i];
      for (unsigned k = 0; k < 16; ++k) {
        const unsigned half = k / 8, thread = k % 8 / 2;
        sum += number(all[4 * row + thread], 2 * half + i / 2, k % 2) *
               number(all[4 * column + thread], 4 + half, k % 2);
      }
      *to[i] = sum;
    }
    fibers::wait_for_warp();
  }

 private:
  // Of what a thread gives: the second or the first number of a pair.
  static float number(long long given, unsigned pair, unsigned which) {
    const unsigned bits = reinterpret_cast<const unsigned*>(given)[pair] >> 16 * which;
    return warploom::to_float(Element{static_cast<unsigned short>(bits)});
  }
};
using SM80_16x8x16_F32F16F16F32_TN = MultiplyBlocks<warploom::half_t>;
using SM80_16x8x16_F32BF16BF16F32_TN = MultiplyBlocks<warploom::bfloat16_t>;

}  // namespace cute
