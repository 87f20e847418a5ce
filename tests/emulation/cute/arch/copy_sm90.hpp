// stmatrix: lanes 8 * i, 8 * i + 1, ... name the rows of matrix i, of which each has 8 elements.
#pragma once

#include <cute/layout.hpp>

namespace cute {

struct SM90_U32x4_STSM_N {
  static void copy(unsigned a, unsigned b, unsigned c, unsigned d, uint128_t& target) {
    const unsigned pairs[4] = {a, b, c, d};
    const unsigned lane = fibers::running % 32, first = fibers::running / 32 * 32;
    fibers::cta->values[fibers::running] = reinterpret_cast<long long>(&target);
    fibers::wait_for_warp();
    for (int i = 0; i < 4; ++i) {
      const long long row = fibers::cta->values[first + 8 * i + lane / 4];
      std::memcpy(reinterpret_cast<char*>(row) + lane % 4 * 4, &pairs[i], 4);
    }
    fibers::wait_for_warp();
  }
};

}  // namespace cute
