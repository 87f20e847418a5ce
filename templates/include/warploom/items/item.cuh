// A work item: which fused query rows (FlashInfer, appendix A) of which request see which keys.
#pragma once

#include <warploom/staging/arena.cuh>

#include <warploom/opening.hpp>

namespace warploom {

// Reads a plan record in 16-byte loads.
template <class Record>
WL_FN Record load_record(const int* records, int index) {
  static_assert(sizeof(Record) % 16 == 0 && alignof(Record) == 16,
                "records that are read per item are whole 16-byte words");
  constexpr int kWords = sizeof(Record) / 16;
  int4 words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = __ldg(reinterpret_cast<const int4*>(records) + index * kWords + i);
  }
  Record record;
  memcpy(&record, words, sizeof(Record));
  return record;
}

// An item's records; the second load waits for the first.
template <class K>
WL_FN Opening<K> load_opening(const typename K::Params& p, int index) {
  const auto work = load_record<typename K::WorkItem>(p.items, index);
  return {work, load_record<typename K::Segment>(p.segments, work.segment)};
}
// The records of a list's first item, in loads that wait for nothing; the list must not be empty.
template <class K>
WL_FN Opening<K> load_first_opening(const typename K::Params& p, unsigned list) {
  return load_record<Opening<K>>(p.openings, list);
}

// The item that a CTA works on. Its facts lie in shared memory: accumulators need the registers.
template <class K>
struct Item {
  using C = typename K::Config;
  using Facts = ItemFacts<K>;

  const typename K::Params& p;
  typename K::template Arena<K> arena;

  WL_FN const Facts& facts() const { return arena.facts(); }
  WL_FN const TileInfo& tile() const { return facts().tile; }
  // Positions of a row of the tile; a row past the last one has the last one's, so that what
  // functors load for it exists.
  WL_FN const Row<K>& row(int r) const { return arena.row(r); }
  // The TileInfo for a row (in a composed plan: that of the row's request), or for a key.
  WL_FN const TileInfo& tile_of(const RowInfo& /*row*/) const { return tile(); }
  WL_FN TileInfo tile_of(const PackedRow& row) const {
    return {row.batch, row.kv_head, row.q_len, row.kv_len, p.num_q_heads, p.num_kv_heads};
  }
  WL_FN const TileInfo& tile_of(int /*kv_pos*/) const { return tile(); }

  // Opens an item, by `threads` threads (whole warps), for which all readers must wait afterwards.
  // Each warp computes a part of the facts: the cost is the chain of dependent instructions.
  WL_FN void open(const Opening<K>& opening, int index, unsigned thread, unsigned threads) const {
    const auto& [work, segment] = opening;
    ask_for_blocks(work, segment, thread);
    if constexpr (C::kComposed) return open_packed(work, segment, index, thread, threads);
    const int rows = min(C::kRows, segment.num_q * p.group_size - work.row_begin);
    const int lane = thread % kWarpSize;
#pragma unroll 1
    for (unsigned part = thread / kWarpSize; part < 3; part += threads / kWarpSize) {
      if (part == 0) write_bounds(work, segment, rows, lane);
      if (part == 1 && lane == 0) write_first_tokens(work, segment);
      if (part == 2 && lane == 0) write_sizes(work, segment, rows, index);
    }
#pragma unroll 1
    for (int r = thread; r < C::kRows; r += threads) {
      static_cast<RowInfo&>(arena.row(r)) = locate(work, segment, min(r, rows - 1));
    }
  }

  // A row of a composed plan's unit, by its code.
  WL_FN PackedRow row_of_unit(int code, int kv_head) const {
    const int within = code % kRowCode;
    const auto unit = load_record<typename K::Unit>(p.units, code / kRowCode);
    const int heads = unit.num_heads;
    const int query = (heads & (heads - 1)) == 0 ? within >> (__ffs(heads) - 1) : within / heads;
    PackedRow row;
    row.q_pos = unit.q_pos + query;
    row.q_head = kv_head * p.group_size + unit.first_head + within - query * heads;
    row.q_row = unit.q_row + query;
    row.batch = unit.batch;
    row.q_len = unit.q_len;
    row.kv_len = unit.kv_len;
    row.kv_head = kv_head;
    return row;
  }

  // Offsets of rows in elements. Rows of a composed plan, of several requests, lie in one tensor.
  WL_FN long long q_offset(const RowInfo& row) const {
    return batch() * p.q_batch_stride + row.q_row * p.q_row_stride + row.q_head * p.q_head_stride;
  }
  WL_FN long long o_offset(const RowInfo& row) const {
    return batch() * p.o_batch_stride + row.q_row * p.o_row_stride + row.q_head * p.o_head_stride;
  }
  WL_FN long long lse_offset(const RowInfo& row) const {
    return batch() * p.lse_batch_stride + row.q_row * p.lse_row_stride +
           row.q_head * p.lse_head_stride;
  }
  WL_FN long long max_scores_offset(const RowInfo& row) const {
    return batch() * p.max_scores_batch_stride + row.q_row * p.max_scores_row_stride +
           row.q_head * p.max_scores_head_stride;
  }

 private:
  WL_FN long long batch() const {
    if constexpr (C::kComposed) return 0;
    return tile().batch;
  }

  using WorkItem = typename K::WorkItem;
  using Segment = typename K::Segment;
  using KvElement = typename C::KvElement;

  // Prefetches the part of the block list that says where the keys are, while facts are computed.
  WL_FN void ask_for_blocks(const WorkItem& work, const Segment& segment, unsigned thread) const {
    if constexpr (C::kIndexed) {
      constexpr int kLine = 32;  // blocks that lie in 128 bytes
      const unsigned begin = unsigned(work.kv_begin) / C::kBlockKv + thread * kLine;
      if (begin < (unsigned(work.kv_end) + C::kBlockKv - 1) / C::kBlockKv) {
        const int first = segment.index_begin + work.kv_head * segment.index_head_stride;
        prefetch(p.indices + first + begin);
      }
    }
  }

  // The same for a composed plan, where each row says which request it belongs to.
  WL_FN void open_packed(const WorkItem& work, const Segment& segment, int index, unsigned thread,
                         unsigned threads) const {
    static_assert(C::kRows <= kRowCode, "a row within its unit has a code of its own");
    const int rows = work.rows;
    if (thread < kWarpSize) write_packed_bounds(work, segment, rows, thread);
    const unsigned last = threads - kWarpSize;  // another warp, if there is one
    if (thread == last) write_first_tokens(work, segment);
    if (thread == last) write_sizes(work, segment, rows, index);
#pragma unroll 1
    for (int r = thread; r < C::kRows; r += threads) {
      if constexpr (C::kComposed) arena.row(r) = unpack(work, min(r, rows - 1));
    }
  }
  WL_FN PackedRow unpack(const WorkItem& work, int r) const {
    return row_of_unit(__ldg(p.packed_rows + work.row_begin + r), work.kv_head);
  }
  WL_FN void write_packed_bounds(const WorkItem& work, const Segment& segment, int rows,
                                 int lane) const {
    using Variant = typename K::Variant;
    Range places{work.kv_begin, work.kv_end};
    bool sees_all = true;
    if constexpr (Variant::kHasLogitsMask) {
      const Range kv_pos{segment.kv_pos + work.kv_begin, segment.kv_pos + work.kv_end};
      int begin = 0x7fffffff, end = 0;
#pragma unroll 1
      for (int r = lane; r < rows; r += kWarpSize) {
        const PackedRow row = unpack(work, r);
        const TileInfo tile = tile_of(row);
        const Range q_pos{row.q_pos, row.q_pos + 1}, q_head{row.q_head, row.q_head + 1};
        const Range seen = Variant::kv_bounds(p, tile, q_pos, q_head);
        begin = seen.begin < seen.end ? min(begin, seen.begin) : begin;
        end = seen.begin < seen.end ? max(end, seen.end) : end;
        sees_all = sees_all && kv_pos.begin < kv_pos.end &&
                   Variant::classify(p, tile, q_pos, kv_pos, q_head) == TileClass::kFull;
      }
      sees_all = __all_sync(kAllLanes, sees_all);
      begin = __reduce_min_sync(kAllLanes, begin);
      end = __reduce_max_sync(kAllLanes, end);
      const int hidden = max(min(begin, end) - segment.kv_pos - work.kv_begin, 0);
      places = {work.kv_begin + hidden / C::kKeys * C::kKeys,
                min(work.kv_end, end - segment.kv_pos)};
    }
    if (lane == 0) arena.facts().places = places;
    if (lane == 0) arena.facts().sees_all = sees_all;
  }

  WL_FN RowInfo locate(const WorkItem& work, const Segment& segment, int r) const {
    const int fused = work.row_begin + r;
    // Groups are mostly powers of two, and a division costs 40 instructions.
    const int group = p.group_size;
    const int query = (group & (group - 1)) == 0 ? fused >> (__ffs(group) - 1) : fused / group;
    return {segment.q_idx + query + segment.kv_len - segment.q_len,
            work.kv_head * group + fused - query * group, segment.q_row + query};
  }
  WL_FN TileInfo tile_of(const WorkItem& work, const Segment& segment) const {
    return {segment.batch,  work.kv_head,  segment.q_len,
            segment.kv_len, p.num_q_heads, p.num_kv_heads};
  }

  // Writes the ranges of query positions and heads, and the range of keys to walk.
  WL_FN void write_bounds(const WorkItem& work, const Segment& segment, int rows, int lane) const {
    constexpr bool kMaskHidesRest = K::template Arena<K>::kMaskHidesRest;
    if (!kMaskHidesRest && lane > 0) return;
    Facts& facts = arena.facts();
    const RowInfo first = locate(work, segment, 0), last = locate(work, segment, rows - 1);
    const int head = work.kv_head * p.group_size;
    const Range q_pos{first.q_pos, last.q_pos + 1}, heads{head, head + p.group_size};
    const Range q_head = first.q_pos == last.q_pos ? Range{first.q_head, last.q_head + 1} : heads;
    Range places{work.kv_begin, work.kv_end};
    if constexpr (K::Variant::kHasLogitsMask && !C::kColumnPositions) {
      // The begin is rounded down to a key tile, so that tiles lie as planned. With tensor copies
      // the end is rounded up, and the mask hides the surplus; but never to keys that no row of the
      // request sees, whose memory may hold anything. Lane 1 computes that limit.
      const Range all{segment.kv_len - segment.q_len, segment.kv_len};
      const bool asks_for_all = kMaskHidesRest && lane > 0;
      const Range seen = K::Variant::kv_bounds(
          p, tile_of(work, segment), asks_for_all ? all : q_pos, asks_for_all ? heads : q_head);
      const int hidden = max(seen.begin - segment.kv_pos - work.kv_begin, 0);
      int end = min(work.kv_end, seen.end - segment.kv_pos);
      if constexpr (kMaskHidesRest) {
        const int ever = __shfl_sync(kAllLanes, seen.end, 1);
        end = min(round_up(end, C::kKeys), min(segment.kv_count, ever - segment.kv_pos));
      }
      places = {work.kv_begin + hidden / C::kKeys * C::kKeys, end};
    }
    if (lane > 0) return;
    facts.q_pos = q_pos;
    facts.q_head = q_head;
    facts.places = places;
  }

  WL_FN void write_first_tokens(const WorkItem& work, const Segment& segment) const {
    Facts& facts = arena.facts();
    facts.keys =
        first_token(work, segment, p.k, p.k_block_stride, p.k_token_stride, p.k_head_stride);
    facts.values =
        first_token(work, segment, p.v, p.v_block_stride, p.v_token_stride, p.v_head_stride);
  }

  WL_FN void write_sizes(const WorkItem& work, const Segment& segment, int rows, int index) const {
    Facts& facts = arena.facts();
    facts.tile = tile_of(work, segment);
    facts.rows = rows;
    facts.kv_pos = segment.kv_pos;
    facts.index_begin = segment.index_begin + work.kv_head * segment.index_head_stride;
    facts.kv_row = segment.kv_row;
    facts.kv_block = segment.kv_block;
    facts.slot = work.slot;
    facts.merge = work.merge;
    facts.index = index;
  }

  WL_FN const KvElement* first_token(const WorkItem& work, const Segment& segment,
                                     const void* tensor, long long block_stride,
                                     long long token_stride, long long head_stride) const {
    return static_cast<const KvElement*>(tensor) + work.kv_head * head_stride +
           segment.kv_row * token_stride + (C::kIndexed ? 0 : segment.kv_block * block_stride);
  }
};

}  // namespace warploom
