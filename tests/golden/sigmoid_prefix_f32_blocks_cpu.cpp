// cpu_FlashSigmoid_PrefixLM_f32_d64_blocksparse8_r32k64: FlashSigmoid_PrefixLM, float32, head_dim 64/64
// BlockSparse(layout='NHD', block=(16, 8))
// rendered by warploom from templates/cpu.cpp.j2

#include <warploom/threads.hpp>

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
  const int* x_prefix_len;  // tensor input
  long long x_prefix_len_s0;  // its stride
  int num_q_heads;  // query heads
  int num_kv_heads;  // key/value heads
  int group_size;  // query heads per key/value head
  float sm_scale;  // factor of q.k before logits_transform
  float lse_scale;  // 1 for natural log-sum-exp, log2(e) for base 2
  float x_scale;  // scalar input
  float x_bias;  // scalar input
  int x_prefix_len_n0;  // its size
};

struct Variant : IdentityVariant<Params> {
  static constexpr bool kHasLogitsMask = true;
  static constexpr bool kHasLogitsTransform = true;
  static constexpr bool kSoftmax = false;
  struct TileState { int t0; };
  WL_FN static TileState tile_state(const Params& p, const TileInfo& tile) {
    return {load(p.x_prefix_len, tile.batch * p.x_prefix_len_s0)};
  }
  struct ColState { int c0; };
  WL_FN static ColState col_state(const Params& p, const TileInfo& tile, const TileState& ts, int kv_pos) {
    return {kv_pos < ts.t0};
  }
  static constexpr bool kHasColState = true;
  WL_FN static float logits(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos, const ColState& cs, float logits) {
    return sigmoid(logits * p.x_scale + p.x_bias);
  }
  WL_FN static bool mask(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos, const ColState& cs) {
    return (cs.c0 != 0) | (kv_pos <= row.q_pos);
  }
  WL_FN static TileClass classify(const Params& p, const TileInfo& tile, Range q_pos,
      Range kv_pos, Range q_head) {
    const wide kv_pos_first = kv_pos.begin;
    const wide batch = tile.batch;
    const wide v0 = wide(load(p.x_prefix_len, batch * p.x_prefix_len_s0));
    const wide q_pos_last = q_pos.end - 1;
    const wide kv_pos_last = kv_pos.end - 1;
    const wide q_pos_first = q_pos.begin;
    return tile_class((kv_pos_first < v0) | (kv_pos_first <= q_pos_last), (kv_pos_last >= v0) & (kv_pos_last > q_pos_first));
  }
  WL_FN static Range kv_bounds(const Params& p, const TileInfo& tile, Range q_pos,
      Range q_head) {
    const wide batch = tile.batch;
    const wide v0 = wide(load(p.x_prefix_len, batch * p.x_prefix_len_s0)) - 1LL;
    const wide kv_len = tile.kv_len;
    const wide q_pos_last = q_pos.end - 1;
    const wide v1 = max(min(v0 < 0LL ? kv_len : 0LL, q_pos_last < 0LL ? kv_len : 0LL), 0LL);
    const wide v2 = min(v1, kv_len);
    const wide v3 = kv_len - 1LL;
    return {int(v2), int(max(min(max(min(v0, v3), min(q_pos_last, v3)) + 1LL, kv_len), v2))};
  }
  static constexpr bool kClassesRead = true;
};

struct Config {
  using Element = float;
  using KvElement = float;
  static constexpr int kHeadDimQk = 64;
  static constexpr int kHeadDimV = 64;
  static constexpr int kRows = 32;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = 1;
  static constexpr int kStages = 1;
  static constexpr int kBlockKv = 8;
  static constexpr bool kIndexed = true;
  static constexpr bool kColumnPositions = true;
  static constexpr bool kComposed = false;
};

struct Kernel {
  using Config = warploom::Config;
  using Merge = warploom::Merge;
  using Params = warploom::Params;
  using Segment = warploom::Segment;
  using Variant = warploom::Variant;
  using WorkItem = warploom::WorkItem;
};

}  // namespace warploom

// 0, or a number of warploom::Status.
extern "C" __attribute__((visibility("default"))) int warploom_kernel(
    const warploom::Params* p, int num_ctas, int num_threads) {
  return warploom::run_kernel<warploom::Kernel>(*p, num_ctas, num_threads);
}
