// ldmatrix: lanes 8 * i, 8 * i + 1, ... name the rows of matrix i, of which each has 8 elements.
#pragma once

#include <cute/layout.hpp>

namespace cute {

template <bool kTransposed>
struct LoadMatrices {
  static void copy(const uint128_t& source, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    unsigned* const to[4] = {&a, &b, &c, &d};
    const unsigned lane = fibers::running % 32, first = fibers::running / 32 * 32;
    fibers::cta->values[fibers::running] = reinterpret_cast<long long>(&source);
    fibers::wait_for_warp();
    for (int i = 0; i < 4; ++i) {
      unsigned short pair[2];
      for (int e = 0; e < 2; ++e) {
        const unsigned other = lane % 4 * 2 + e;
        const unsigned row = kTransposed ? other : lane / 4;
        const unsigned column = kTransposed ? lane / 4 : other;
        pair[e] =
            reinterpret_cast<const unsigned short*>(fibers::cta->values[first + 8 * i + row])[column];
      }
      *to[i] = pair[0] | unsigned(pair[1]) << 16;
    }
    fibers::wait_for_warp();
  }
};
using SM75_U32x4_LDSM_N = LoadMatrices<false>;
using SM75_U16x8_LDSM_T = LoadMatrices<true>;

}  // namespace cute
