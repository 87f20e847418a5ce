// Stands in for the device's header of that name. Bulk copies, and arrivals behind other copies,
// happen some time later.
#pragma once

#include <cute/arch/util.hpp>

#include <warploom/device/qualifiers.cuh>

namespace warploom {

// As tests/support/emulator.py encodes it.
struct alignas(64) TensorMap {
  const char* first;
  unsigned long long sizes[4];    // lanes, tokens, heads, blocks
  unsigned long long strides[3];  // bytes from token to token, head to head, block to block
  unsigned long long box_lanes, box_tokens, lane_bytes;
};

}  // namespace warploom

namespace warploom::hopper {

using Barrier = std::uint64_t;

struct BarrierState {
  std::uint16_t expected, left;
  int bytes : 24;  // that are announced and have not come
  unsigned phase : 8;

  static BarrierState& of(Barrier* barrier) { return reinterpret_cast<BarrierState&>(*barrier); }
  void arrive() {
    if (left-- == 0) __builtin_trap();  // one more than there are
    complete();
  }
  void complete() {
    if (left != 0 || bytes != 0) return;
    left = expected;
    ++phase;
  }
};
static_assert(sizeof(BarrierState) == sizeof(Barrier));

inline void barrier_init(Barrier* barrier, int arrivals) {
  const auto count = static_cast<std::uint16_t>(arrivals);
  BarrierState::of(barrier) = {count, count, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_end(Barrier* barrier) {
  if (BarrierState::of(barrier).bytes != 0) __builtin_trap();  // copies are on their way
  std::memset(barrier, 0xff, sizeof(*barrier));
}
inline void barrier_arrive(Barrier* barrier) { BarrierState::of(barrier).arrive(); }
inline void barrier_arrive_expect(Barrier* barrier, int bytes) {
  BarrierState::of(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(Barrier* barrier, int parity) {
  fibers::wait_until([=] { return int(BarrierState::of(barrier).phase % 2) != parity; });
}
inline void fence_async_proxy() {}

template <int>
void set_registers_up() {}
template <int>
void set_registers_down() {}

inline void arrive_after_copies(Barrier* barrier) {
  fibers::cta->pending[fibers::running].push_back([=] { barrier_arrive(barrier); });
}

inline void tma_load(const void* map, Barrier* barrier, void* smem, int column, int token, int head,
                     int block) {
  const TensorMap of = *static_cast<const TensorMap*>(map);
  fibers::cta->pending[fibers::running].push_back([=] {
    const unsigned size = of.lane_bytes, row_bytes = size * of.box_lanes;
    const bool exists = head < of.sizes[2] && block < of.sizes[3];
    for (unsigned row = 0; row < of.box_tokens; ++row) {
      for (unsigned lane = 0; lane < of.box_lanes; ++lane) {
        unsigned short bits = 0;  // outside of the tensor
        if (exists && token + row < of.sizes[1] && column + lane < of.sizes[0]) {
          const char* from = of.first + (token + row) * of.strides[0] + head * of.strides[1] +
                             block * of.strides[2] + size * (column + lane);
          std::memcpy(&bits, from, size);
        }
        const unsigned at = cute::cast_smem_ptr_to_uint(smem) + row * row_bytes + size * lane;
        std::memcpy(shared_memory + cute::swizzled(at, row_bytes), &bits, size);
      }
    }
    auto& state = BarrierState::of(barrier);
    state.bytes -= int(of.box_tokens * row_bytes);
    state.complete();
  });
}

inline void tma_load_once(const void* map, Barrier* barrier, void* smem, int column, int token,
                          int head, int block) {
  tma_load(map, barrier, smem, column, token, head, block);
}

}  // namespace warploom::hopper
