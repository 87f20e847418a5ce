// portable_QKNorm_Rope_Alibi_Causal_f16_d64_ragged_r128k64: QKNorm_Rope_Alibi_Causal, float16, head_dim 64/64
// Ragged(layout='NHD')
// rendered by warploom from templates/portable.cu.j2

#include <warploom/portable/kernel.cuh>

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
  const void* q;  // queries
  const void* k;  // keys
  const void* v;  // values
  void* o;  // output
  float* lse;  // log-sum-exp of each row, or null
  const int* header;  // PlanHeader
  const int* cta_indptr;  // list i has items cta_indptr[i] .. cta_indptr[i + 1]
  const int* openings;  // first WorkItem of each list, and that item's Segment
  const int* items;  // WorkItem records
  const int* segments;  // Segment records
  const int* merges;  // Merge records
  const int* indices;  // blocks of keys, if the format is indexed
  float* partial_o;  // [slot, row of tile, head_dim_v] partial outputs
  float* partial_state;  // [slot, row of tile, 2] largest logit, and sum relative to it
  unsigned* arrivals;  // one counter per merge record; zero between launches
  long long q_batch_stride;  // elements
  long long q_row_stride;  // elements
  long long q_head_stride;  // elements
  long long k_block_stride;  // elements
  long long k_token_stride;  // elements
  long long k_head_stride;  // elements
  long long v_block_stride;  // elements
  long long v_token_stride;  // elements
  long long v_head_stride;  // elements
  long long o_batch_stride;  // elements
  long long o_row_stride;  // elements
  long long o_head_stride;  // elements
  long long lse_batch_stride;  // elements
  long long lse_row_stride;  // elements
  long long lse_head_stride;  // elements
  const float* x_q_weight;  // tensor input
  long long x_q_weight_s0;  // its stride
  const float* x_k_weight;  // tensor input
  long long x_k_weight_s0;  // its stride
  int num_q_heads;  // query heads
  int num_kv_heads;  // key/value heads
  int group_size;  // query heads per key/value head
  float sm_scale;  // factor of q.k before logits_transform
  float lse_scale;  // 1 for natural log-sum-exp, log2(e) for base 2
  float x_norm_eps;  // scalar input
  float x_rope_theta;  // scalar input
  int x_q_weight_n0;  // its size
  int x_k_weight_n0;  // its size
};

struct Variant : IdentityVariant<Params> {
  static constexpr bool kHasKeyTransform = true;
  static constexpr bool kHasLinearBias = true;
  static constexpr bool kHasLogitsMask = true;
  static constexpr bool kHasQueryTransform = true;
  struct TileState { float t0; float t1; float t2; };
  WL_FN static TileState tile_state(const Params& p, const TileInfo& tile) {
    const float v0 = precise::exp2(floor(log2(float(tile.num_q_heads) + 0.5f)));
    return {v0,
            1.0f / v0,
            1.0f / positive_scale(p)};
  }
  struct RowState { float r0; };
  WL_FN static RowState row_state(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row) {
    const float v0 = float(row.q_head);
    const float v1 = -4.0f * (2.0f * (v0 - ts.t0) + 1.0f);
    const float v2 = precise::exp2((v0 < ts.t0 ? -8.0f * float(row.q_head + 1) : v1) * ts.t1);
    return {abs(v2) < kInfinity ? min(max(v2 * ts.t2, -1e+20f), 1e+20f) : v2};
  }
  WL_FN static float logits_factor(const Params& p) {
    return positive_scale(p);
  }
  WL_FN static float slope(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs) {
    return rs.r0;
  }
  WL_FN static float linear_bias(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos) {
    return rs.r0 * float(kv_pos - row.q_pos);
  }
  WL_FN static bool mask(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos, const ColState& cs) {
    return kv_pos <= row.q_pos;
  }
  WL_FN static TileClass classify(const Params& p, const TileInfo& tile, Range q_pos,
      Range kv_pos, Range q_head) {
    const wide kv_pos_first = kv_pos.begin;
    const wide q_pos_last = q_pos.end - 1;
    const wide kv_pos_last = kv_pos.end - 1;
    const wide q_pos_first = q_pos.begin;
    return tile_class(kv_pos_first <= q_pos_last, kv_pos_last > q_pos_first);
  }
  WL_FN static Range kv_bounds(const Params& p, const TileInfo& tile, Range q_pos,
      Range q_head) {
    const wide q_pos_last = q_pos.end - 1;
    const wide kv_len = tile.kv_len;
    return {int(0LL), int(max(min(q_pos_last + 1LL, kv_len), 0LL))};
  }
  static constexpr int kQueryReductions = 1;
  template <int I, class X>
  WL_FN static float query_reduce(const Params& p, const TileInfo& tile, const RowInfo& row,
      int lane, int head_dim, const X& x, const float* r) {
    if constexpr (I == 0) {
      return x.own(lane) * x.own(lane);
    }
  }
  struct QueryTile { float t0; };
  WL_FN static QueryTile query_tile(const Params& p, const TileInfo& tile) {
    return {precise::log2(p.x_rope_theta)};
  }
  struct QueryLane { float l0; float l1; };
  WL_FN static QueryLane query_lane(const Params& p, const TileInfo& tile, const QueryTile& ts, int lane, int head_dim) {
    const int v0 = head_dim >> 1;
    const int v1 = lane < v0 ? lane + v0 : lane - v0;
    return {precise::exp2(float(mod(lane, v0)) * (-2.0f / float(head_dim)) * ts.t0), load(p.x_q_weight, clamp_index(v1, p.x_q_weight_n0) * p.x_q_weight_s0)};
  }
  static constexpr int kQueryHalves = -1;
  template <class X>
  WL_FN static float query(const Params& p, const TileInfo& tile, const RowInfo& row, const QueryLane& ls,
      int lane, int head_dim, const X& x, const float* r) {
    const float v0 = precise::rsqrt(r[0] / float(head_dim) + p.x_norm_eps);
    const float v1 = load(p.x_q_weight, clamp_index(lane, p.x_q_weight_n0) * p.x_q_weight_s0);
    const float v2 = float(row.q_pos) * ls.l0;
    const float v3 = x.half(lane, head_dim, head_dim) * v0 * ls.l1;
    return x.own(lane) * v0 * v1 * cos(v2) + (lane < (head_dim >> 1) ? -v3 : v3) * sin(v2);
  }
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
  using KvElement = warploom::half_t;
  static constexpr int kHeadDimQk = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kRows = 128;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 2;
  static constexpr int kBlockKv = 0;
  static constexpr bool kIndexed = false;
  static constexpr bool kColumnPositions = false;
  static constexpr bool kComposed = false;
  struct SharedMemory {
    static constexpr int kQueries = 0, kQueriesBytes = 16384;
    static constexpr int kKeys = 16384, kKeysBytes = 16384;
    static constexpr int kValues = 32768, kValuesBytes = 16384;
    static constexpr int kWideKeys = 49152, kWideKeysBytes = 0;
    static constexpr int kWideValues = 49152, kWideValuesBytes = 0;
    static constexpr int kLanded = 49152, kLandedBytes = 0;
    static constexpr int kAddresses = 49152, kAddressesBytes = 0;
    static constexpr int kPositions = 49152, kPositionsBytes = 0;
    static constexpr int kSlabs = 0, kSlabsBytes = 18432;
    static constexpr int kStatistics = 18432, kStatisticsBytes = 512;
    static constexpr int kItems = 49152, kItemsBytes = 1648;
    static constexpr int kBytes = 50800;
  };
};

struct Kernel {
  using Config = warploom::Config;
  using Params = warploom::Params;
  using Segment = warploom::Segment;
  using Variant = warploom::Variant;
  using WorkItem = warploom::WorkItem;
  template <class K> using Arena = warploom::Arena<K>;
};

}  // namespace warploom

extern "C" __global__ void __launch_bounds__(128, 2)
warploom_kernel(const __grid_constant__ warploom::Params p) {
  warploom::run_portable_kernel<warploom::Kernel>(p);
}
