// A work item in positions: which rows of the fused query matrix (appendix A of FlashInfer), whose
// request, and what the variant keeps per row.
#pragma once

#include <warploom/compute/simd.hpp>
#include <warploom/variant.hpp>

namespace warploom {

// Plan buffers promise the alignment of an int only.
template <class Record>
WL_INLINE Record load_record(const int* records, int index) {
  return load_as<Record>(records + static_cast<long long>(index) * (sizeof(Record) / sizeof(int)));
}

// Fused rows of a work item.
template <class K, class Params, class WorkItem, class Segment>
WL_INLINE int rows_of(const Params& p, const WorkItem& work, const Segment& segment) {
  if constexpr (K::Config::kComposed) return work.rows;
  return min_int(K::Config::kRows, segment.num_q * p.group_size - work.row_begin);
}

// What rows have of their own in a composed plan, where a tile holds those of several requests.
template <class K, bool kComposed = K::Config::kComposed>
struct PackedRows {};

template <class K>
struct PackedRows<K, true> {
  static_assert(K::Config::kRows <= kRowCode, "a row within its unit has a code of its own");
  static constexpr int kPadded = round_up(K::Config::kRows, kPanel);
  TileInfo tile[kPadded];
  typename K::Variant::TileState state[K::Config::kRows];
};

// K bundles the types of one rendered kernel: Params, Variant, Config and the plan records.
template <class K>
struct Item {
  using Config = typename K::Config;
  using Variant = typename K::Variant;

  const typename K::Params& p;
  typename K::WorkItem work;
  typename K::Segment segment;
  TileInfo tile;
  typename Variant::TileState state;
  int rows;  // rows that exist; at most kRows
  // Positions of each row. Rows up to a whole panel repeat the last one, so that what functors load
  // for them exists.
  static constexpr int kPadded = round_up(Config::kRows, kPanel);
  int q_pos[kPadded], q_head[kPadded], q_row[kPadded];
  typename Variant::RowState row_state[Config::kRows];
  PackedRows<K> packed;

  Item(const typename K::Params& params, int index)
      : p(params),
        work(load_record<typename K::WorkItem>(params.items, index)),
        segment(load_record<typename K::Segment>(params.segments, work.segment)),
        tile{segment.batch,  work.kv_head,       segment.q_len,
             segment.kv_len, params.num_q_heads, params.num_kv_heads},
        state(Variant::tile_state(params, tile)),
        rows(rows_of<K>(params, work, segment)) {
    segment.index_begin += work.kv_head * segment.index_head_stride;
    if constexpr (Config::kComposed) {
      unpack_rows();
      return;
    }
    const int first_q_pos = segment.q_idx + segment.kv_len - segment.q_len;
    for (int r = 0; r < round_up(rows, kPanel); ++r) {
      const int fused = work.row_begin + min_int(r, rows - 1);
      q_pos[r] = first_q_pos + fused / p.group_size;
      q_head[r] = work.kv_head * p.group_size + fused % p.group_size;
      q_row[r] = segment.q_row + fused / p.group_size;
    }
    for (int r = 0; r < rows; ++r) row_state[r] = Variant::row_state(p, tile, state, row(r));
  }

  // No item: rows of a composed plan that are merged, from record `first` on.
  Item(const typename K::Params& params, int first, int count)
      : p(params),
        work{},
        segment{},
        tile{},
        state(Variant::tile_state(params, tile)),
        rows(count) {
    for (int r = 0; r < round_up(rows, kPanel); ++r) {
      const auto row_merge =
          load_record<typename K::RowMerge>(p.row_merges, first + min_int(r, rows - 1));
      unpack_row(r, row_merge.row, row_merge.kv_head);
    }
  }

  RowInfo row(int r) const { return {q_pos[r], q_head[r], q_row[r]}; }
  // The item's facts as a row sees them: in a composed plan, those of the row's request.
  TileInfo tile_of(int r) const {
    if constexpr (Config::kComposed) return packed.tile[r];
    return tile;
  }

  // What the mask says of rows [begin, end) and a range of keys.
  TileClass classify(int begin, int end, Range kv_pos) const {
    if constexpr (!Config::kComposed) {
      return Variant::classify(p, tile, q_positions(begin, end), kv_pos, q_heads(begin, end));
    }
    bool may_see = false, may_hide = false;
    for (int r = begin; r < end; ++r) {
      const TileClass c = Variant::classify(p, tile_of(r), {q_pos[r], q_pos[r] + 1}, kv_pos,
                                            {q_head[r], q_head[r] + 1});
      may_see |= c != TileClass::kSkip;
      may_hide |= c != TileClass::kFull;
    }
    return tile_class(may_see, may_hide);
  }

  // A range that holds all keys which rows [begin, end) may see.
  Range kv_bounds(int begin, int end) const {
    if constexpr (!Config::kComposed) {
      return Variant::kv_bounds(p, tile, q_positions(begin, end), q_heads(begin, end));
    }
    Range all{0x7fffffff, 0};
    for (int r = begin; r < end; ++r) {
      const Range b =
          Variant::kv_bounds(p, tile_of(r), {q_pos[r], q_pos[r] + 1}, {q_head[r], q_head[r] + 1});
      if (b.begin < b.end) all = {min_int(all.begin, b.begin), max_int(all.end, b.end)};
    }
    return all;
  }

  // Position ranges of rows [begin, end), for the tile classes.
  Range q_positions(int begin, int end) const { return {q_pos[begin], q_pos[end - 1] + 1}; }
  Range q_heads(int begin, int end) const {
    if (q_pos[begin] == q_pos[end - 1]) return {q_head[begin], q_head[end - 1] + 1};
    return {work.kv_head * p.group_size, (work.kv_head + 1) * p.group_size};
  }

  // Element offsets of a row; all 64-bit.
  long long q_offset(int r) const {
    return segment.batch * p.q_batch_stride + q_row[r] * p.q_row_stride +
           q_head[r] * p.q_head_stride;
  }
  long long o_offset(int r) const {
    return segment.batch * p.o_batch_stride + q_row[r] * p.o_row_stride +
           q_head[r] * p.o_head_stride;
  }
  long long lse_offset(int r) const {
    return segment.batch * p.lse_batch_stride + q_row[r] * p.lse_row_stride +
           q_head[r] * p.lse_head_stride;
  }
  long long max_scores_offset(int r) const {
    return segment.batch * p.max_scores_batch_stride + q_row[r] * p.max_scores_row_stride +
           q_head[r] * p.max_scores_head_stride;
  }

 private:
  // Row r of a composed plan's tile, by its code.
  void unpack_row(int r, int code, int kv_head) {
    const auto unit = load_record<typename K::Unit>(p.units, code / kRowCode);
    const int within = code % kRowCode, query = within / unit.num_heads;
    q_pos[r] = unit.q_pos + query;
    q_head[r] = kv_head * p.group_size + unit.first_head + within % unit.num_heads;
    q_row[r] = unit.q_row + query;
    packed.tile[r] = {unit.batch, kv_head, unit.q_len, unit.kv_len, p.num_q_heads, p.num_kv_heads};
  }
  void unpack_rows() {
    for (int r = 0; r < round_up(rows, kPanel); ++r) {
      unpack_row(r, p.packed_rows[work.row_begin + min_int(r, rows - 1)], work.kv_head);
    }
    for (int r = 0; r < rows; ++r) {
      packed.state[r] = Variant::tile_state(p, packed.tile[r]);
      row_state[r] = Variant::row_state(p, packed.tile[r], packed.state[r], this->row(r));
    }
  }
};

}  // namespace warploom
