// cpu_Causal_bf16_d128_dense_r48k128_r12k64: Causal, bfloat16, head_dim 128/128
// Dense(layout='NHD')
// rendered by warploom from templates/cpu.cpp.j2

#include <warploom/roles.hpp>

namespace warploom {

struct alignas(16) PlanHeader {
  int num_items;  // work items in all
  int num_segments;  // segments
  int num_merges;  // tiles that were split; row merges in a composed plan
  int num_slots;  // partial slots in use
  int status;  // 0, or why a device refused to plan the batch; there are no items then
  int num_shared_prefills;  // shared lists of prefills, which any CTA claims when it is done
  int num_active;  // CTAs that may have work; those from there on claim nothing
  int num_decode_ctas;  // CTAs that decode: the first ones
  int num_shared_decodes;  // shared lists of decodes, which those claim before prefills
  int claimed;  // counts claims of shared prefills; 0 between launches
  int claimed_decodes;  // counts claims of shared decodes; 0 between launches
  int drawn;  // counts CTAs that drew their number; 0 between launches
  static constexpr int kDecodeLists = 1;  // where own decodes begin, in CTAs of the grid
  static constexpr int kSharedPrefills = 2;  // the same of shared prefills
  static constexpr int kSharedDecodes = 8;  // the same of shared decodes
  static constexpr int kRoleLists = 11;  // where all lists end
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
  int role;  // whose tile the rows and keys are cut into
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
};

struct Variant : IdentityVariant<Params> {
  static constexpr bool kHasLogitsMask = true;
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
};

struct PrefillConfig {
  using Element = warploom::bfloat16_t;
  using KvElement = warploom::bfloat16_t;
  static constexpr int kHeadDimQk = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kRows = 48;
  static constexpr int kKeys = 128;
  static constexpr int kWarps = 1;
  static constexpr int kStages = 1;
  static constexpr int kBlockKv = 0;
  static constexpr bool kIndexed = false;
  static constexpr bool kColumnPositions = false;
  static constexpr bool kComposed = false;
  static constexpr int kSlotRows = 48;
};

struct DecodeConfig {
  using Element = warploom::bfloat16_t;
  using KvElement = warploom::bfloat16_t;
  static constexpr int kHeadDimQk = 128;
  static constexpr int kHeadDimV = 128;
  static constexpr int kRows = 12;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = 1;
  static constexpr int kStages = 1;
  static constexpr int kBlockKv = 0;
  static constexpr bool kIndexed = false;
  static constexpr bool kColumnPositions = false;
  static constexpr bool kComposed = false;
  static constexpr int kSlotRows = 48;
};

template <class Tile>
struct KernelOf {
  using Config = Tile;
  using Merge = warploom::Merge;
  using Params = warploom::Params;
  using Segment = warploom::Segment;
  using Variant = warploom::Variant;
  using WorkItem = warploom::WorkItem;
  using PlanHeader = warploom::PlanHeader;
};

using Kernel = Roles<KernelOf<PrefillConfig>, KernelOf<DecodeConfig>>;

}  // namespace warploom

// 0, or a number of warploom::Status.
extern "C" __attribute__((visibility("default"))) int warploom_kernel(
    const warploom::Params* p, int num_ctas, int num_threads) {
  return warploom::run_roles<warploom::Kernel>(*p, num_ctas, num_threads);
}
