// portable_SoftCap_SlidingWindow_bf16_d128_paged16_r128k64: SoftCap_SlidingWindow, bfloat16, head_dim 128/128
// Paged(layout='NHD', page_size=16)
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
  int num_q_heads;  // query heads
  int num_kv_heads;  // key/value heads
  int group_size;  // query heads per key/value head
  float sm_scale;  // factor of q.k before logits_transform
  float lse_scale;  // 1 for natural log-sum-exp, log2(e) for base 2
  float x_cap;  // scalar input
  int x_left;  // scalar input
  int x_right;  // scalar input
};

struct Variant : IdentityVariant<Params> {
  static constexpr bool kHasLogitsMask = true;
  static constexpr bool kHasLogitsTransform = true;
  struct TileState { float t0; int t1; int t2; };
  WL_FN static TileState tile_state(const Params& p, const TileInfo& tile) {
    return {positive_scale(p) * (1.0f / max(abs(p.x_cap), 1e-30f)),
            max(p.x_left < 0 ? 1073741824 : p.x_left, 0),
            min(max(p.x_right < 0 ? 1073741824 : p.x_right, 0), 1073741824)};
  }
  struct RowState { int r0; int r1; };
  WL_FN static RowState row_state(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row) {
    return {max(row.q_pos, 0) - ts.t1,
            row.q_pos + ts.t2};
  }
  WL_FN static float logits(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos, const ColState& cs, float logits) {
    return tanh(logits * ts.t0);
  }
  WL_FN static float logits_factor(const Params& p) {
    return max(abs(p.x_cap), 1e-30f);
  }
  WL_FN static bool mask(const Params& p, const TileInfo& tile, const TileState& ts,
      const RowInfo& row, const RowState& rs, int kv_pos, const ColState& cs) {
    return (kv_pos >= rs.r0) & (kv_pos <= rs.r1);
  }
  WL_FN static TileClass classify(const Params& p, const TileInfo& tile, Range q_pos,
      Range kv_pos, Range q_head) {
    const wide kv_pos_last = kv_pos.end - 1;
    const wide x_left = p.x_left;
    const wide v0 = max(x_left < 0LL ? 1073741824LL : x_left, 0LL);
    const wide q_pos_first = q_pos.begin;
    const wide kv_pos_first = kv_pos.begin;
    const wide q_pos_last = q_pos.end - 1;
    const wide x_right = p.x_right;
    const wide v1 = min(max(x_right < 0LL ? 1073741824LL : x_right, 0LL), 1073741824LL);
    return tile_class((kv_pos_last + v0 >= max(q_pos_first, 0LL)) & (kv_pos_first <= q_pos_last + v1), (kv_pos_first + v0 < max(q_pos_last, 0LL)) | (kv_pos_last > q_pos_first + v1));
  }
  WL_FN static Range kv_bounds(const Params& p, const TileInfo& tile, Range q_pos,
      Range q_head) {
    const wide q_pos_first = q_pos.begin;
    const wide x_left = p.x_left;
    const wide kv_len = tile.kv_len;
    const wide v0 = max(max(q_pos_first, 0LL) - max(x_left < 0LL ? 1073741824LL : x_left, 0LL), 0LL);
    const wide v1 = min(v0, kv_len);
    const wide q_pos_last = q_pos.end - 1;
    const wide x_right = p.x_right;
    const wide v2 = q_pos_last + min(max(x_right < 0LL ? 1073741824LL : x_right, 0LL), 1073741824LL);
    return {int(v1), int(max(min(v2 + 1LL, kv_len), v1))};
  }
};

struct Config {
  using Element = warploom::bfloat16_t;
  using KvElement = warploom::bfloat16_t;
  static constexpr int kHeadDimQk = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kRows = 128;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 2;
  static constexpr int kBlockKv = 16;
  static constexpr bool kIndexed = true;
  static constexpr bool kColumnPositions = false;
  static constexpr bool kComposed = false;
  struct SharedMemory {
    static constexpr int kQueries = 0, kQueriesBytes = 32768;
    static constexpr int kKeys = 32768, kKeysBytes = 32768;
    static constexpr int kValues = 65536, kValuesBytes = 32768;
    static constexpr int kWideKeys = 98304, kWideKeysBytes = 0;
    static constexpr int kWideValues = 98304, kWideValuesBytes = 0;
    static constexpr int kLanded = 98304, kLandedBytes = 0;
    static constexpr int kAddresses = 98304, kAddressesBytes = 3072;
    static constexpr int kPositions = 101376, kPositionsBytes = 0;
    static constexpr int kSlabs = 0, kSlabsBytes = 34816;
    static constexpr int kStatistics = 34816, kStatisticsBytes = 512;
    static constexpr int kItems = 101376, kItemsBytes = 1648;
    static constexpr int kBytes = 103024;
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
