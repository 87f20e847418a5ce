// pretransform_float16_d64_h4: QKNorm_Rope_Alibi_Causal
// rendered by warploom from templates/pretransform.cu.j2

#include <warploom/pretransform.cuh>

namespace warploom {

struct alignas(4) PlanHeader {
  int num_items;  // work items in all
  int num_segments;  // segments
  int num_merges;  // tiles that were split; row merges in a composed plan
  int num_slots;  // partial slots in use
  int status;  // 0, or why a device refused to plan the batch; there are no items then
};

struct alignas(16) Segment {
  int batch;  // request
  int q_row;  // first row of the segment in q and o (within the request's batch entry if dense)
  int q_idx;  // that row's index in the request
  int num_q;  // query rows of the segment
  int q_len;  // query rows of the request
  int kv_len;  // keys of the request; kv_pos is below it
  int kv_count;  // keys in this segment's list
  int kv_block;  // first index into the blocked dimension, if storage is affine (batch if dense)
  int kv_row;  // first token: within that block if storage is affine, of column 0 if block-sparse
  int index_begin;  // first entry of the segment's block list
  int kv_pos;  // position of the list's first key (0 but for composed formats)
  int index_head_stride;  // entries between the lists of two key/value heads; 0: they share one
};

struct alignas(16) WorkItem {
  int segment;  // index of the segment
  int kv_head;  // key/value head
  int row_begin;  // first fused row (query row x group + query head in group) within the segment
  int kv_begin;  // first key, index into the segment's list; a multiple of the kv tile
  int kv_end;  // one past the last key
  int slot;  // partial slot that takes the result, or -1: write the output
  int merge;  // index of the merge record, or -1
  int rows;  // fused rows of the tile in a composed plan, else 0
};

struct alignas(4) Merge {
  int first_slot;  // first partial slot of the tile; slots of one tile are consecutive
  int num_slots;  // how many, in ascending order of keys
};

struct Params {
  const void* k;  // keys
  void* pretransformed;  // the same, transformed
  const int* segments;  // Segment records, in the order of their keys
  long long k_block_stride;  // elements
  long long k_token_stride;  // elements
  long long k_head_stride;  // elements
  long long pretransformed_block_stride;  // elements
  long long pretransformed_token_stride;  // elements
  long long pretransformed_head_stride;  // elements
  const float* x_k_weight;  // tensor input
  long long x_k_weight_s0;  // its stride
  int num_segments;  // segments
  int num_blocks;  // batch entries if dense, else 1
  int num_tokens;  // of each block
  int num_q_heads;  // query heads, for functors
  int num_kv_heads;  // key/value heads
  float x_norm_eps;  // scalar input
  float x_rope_theta;  // scalar input
  int x_k_weight_n0;  // its size
};

struct Variant : IdentityVariant<Params> {
  static constexpr bool kHasKeyTransform = true;
  static constexpr int kKeyReductions = 1;
  template <int I, class X>
  WL_FN static float key_reduce(const Params& p, const TileInfo& tile, int kv_pos,
      int lane, int head_dim, const X& x, const float* r) {
    if constexpr (I == 0) {
      return x.own(lane) * x.own(lane);
    }
  }
  struct KeyTile { float t0; };
  WL_FN static KeyTile key_tile(const Params& p, const TileInfo& tile) {
    return {precise::log2(p.x_rope_theta)};
  }
  struct KeyLane { float l0; float l1; };
  WL_FN static KeyLane key_lane(const Params& p, const TileInfo& tile, const KeyTile& ts, int lane, int head_dim) {
    const int v0 = head_dim >> 1;
    const int v1 = lane < v0 ? lane + v0 : lane - v0;
    return {precise::exp2(float(mod(lane, v0)) * (-2.0f / float(head_dim)) * ts.t0), load(p.x_k_weight, clamp_index(v1, p.x_k_weight_n0) * p.x_k_weight_s0)};
  }
  static constexpr int kKeyHalves = -1;
  template <class X>
  WL_FN static float key(const Params& p, const TileInfo& tile, int kv_pos, const KeyLane& ls,
      int lane, int head_dim, const X& x, const float* r) {
    const float v0 = precise::rsqrt(r[0] / float(head_dim) + p.x_norm_eps);
    const float v1 = load(p.x_k_weight, clamp_index(lane, p.x_k_weight_n0) * p.x_k_weight_s0);
    const float v2 = float(kv_pos) * ls.l0;
    const float v3 = x.half(lane, head_dim, head_dim) * v0 * ls.l1;
    return x.own(lane) * v0 * v1 * cos(v2) + (lane < (head_dim >> 1) ? -v3 : v3) * sin(v2);
  }
};

struct Config {
  using Element = warploom::half_t;
  static constexpr int kHeadDimQk = 64;
  static constexpr int kHeads = 4;
  static constexpr bool kKeepsStates = true;
  static constexpr bool kReadsHead = false;
};

struct Kernel {
  using Config = warploom::Config;
  using Params = warploom::Params;
  using Variant = warploom::Variant;
  using Segment = warploom::Segment;
};

}  // namespace warploom

extern "C" __global__ void __launch_bounds__(128, 1)
warploom_kernel(const __grid_constant__ warploom::Params p) {
  warploom::run_pretransform<warploom::Kernel>(p);
}
