// Keys through their transform into scratch memory, once, for attention kernels that would
// transform them for each query tile that meets them (decision 0027).
//
// A team works on one token and some neighbouring heads: what a transform computes of the position
// alone, such as sines, it computes once for these, and their loads are under way together.
#pragma once

#include <warploom/device/overlap.cuh>
#include <warploom/team_vector.cuh>

namespace warploom {

// The segment of a token: the last that begins at or before it. Segments stand in the order of
// their keys: by blocks (entries of a dense batch), or by rows of the one block that there is.
template <class K>
WL_FN typename K::Segment segment_of(const typename K::Params& p, int block, int token) {
  const auto* segments = reinterpret_cast<const typename K::Segment*>(p.segments);
  int low = 0, high = p.num_segments - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const auto& at = segments[middle];
    if (at.kv_block < block || (at.kv_block == block && at.kv_row <= token)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return segments[low];
}

// The key hook, for a lane of a team.
template <class K>
class KeyTeam {
  using C = typename K::Config;
  using Params = typename K::Params;
  using Element = typename C::Element;
  using Hook = StoredKey<K>;

 public:
  static constexpr int kLanes = team_lanes(C::kHeadDimQk);

  WL_FN KeyTeam(const Params& p, int lane) : p_(p), own_(lane), states_(p, {}, own_.first) {}

  // kHeads heads of a token, from `head` on.
  WL_FN void pretransform(int block, int token, int head, bool exists) const {
    const auto segment = segment_of<K>(p_, block, token);
    const int place = token - segment.kv_row;
    // What functors load for a token of no request exists at least.
    const int kv_pos = segment.kv_pos + max(min(place, segment.kv_count - 1), 0);
    const auto* from = static_cast<const Element*>(p_.k) + block * p_.k_block_stride +
                       token * p_.k_token_stride + head * p_.k_head_stride;
    auto* to = static_cast<Element*>(p_.pretransformed) + block * p_.pretransformed_block_stride +
               token * p_.pretransformed_token_stride + head * p_.pretransformed_head_stride +
               own_.first;
    TeamRow<Hook, Element> x[C::kHeads];
    TeamVector<Element> made[C::kHeads];
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) x[h].load(from + h * p_.k_head_stride, own_.first);
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h) {
      // The very same for all heads where that makes no difference, so that compilers see it.
      const TileInfo tile{segment.batch,  C::kReadsHead ? head + h : head,
                          segment.q_len,  segment.kv_len,
                          p_.num_q_heads, p_.num_kv_heads};
      made[h] = transformed<Element>(p_, tile, kv_pos, x[h], own_, states(tile));
    }
    if (!exists || place >= segment.kv_count || !own_.counts) return;
#pragma unroll
    for (int h = 0; h < C::kHeads; ++h)
      store_vector(to + h * p_.pretransformed_head_stride, made[h]);
  }

 private:
  WL_FN TeamStates<Hook> states(const TileInfo& tile) const {
    if constexpr (C::kKeepsStates) return states_;
    return {p_, tile, own_.first};
  }

  const Params& p_;
  TeamLane<Hook, kLanes> own_;
  TeamStates<Hook> states_;  // where they are the same for all keys
};

// All tokens, by all threads of the grid; kHeads divides the number of heads.
template <class K>
WL_FN void run_pretransform(const typename K::Params& p) {
  constexpr int kLanes = KeyTeam<K>::kLanes, kHeads = K::Config::kHeads;
  await_earlier_kernels();
  const unsigned parts = p.num_kv_heads / kHeads;
  const unsigned tasks = p.num_blocks * p.num_tokens * parts;  // an int: pretransformed_keys.py
  const unsigned teams = gridDim.x * blockDim.x / kLanes;
  const unsigned team = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  const unsigned in_warp = threadIdx.x % kWarpSize / kLanes;
  const KeyTeam<K> keys(p, threadIdx.x % kLanes);
  for (unsigned first = team - in_warp; first < tasks; first += teams) {
    const unsigned task = first + in_warp < tasks ? first + in_warp : tasks - 1;
    const unsigned row = task / parts;
    const unsigned block = p.num_blocks == 1 ? 0 : row / p.num_tokens;
    keys.pretransform(block, row - block * p.num_tokens, (task - row * parts) * kHeads,
                      first + in_warp < tasks);
  }
}

}  // namespace warploom
