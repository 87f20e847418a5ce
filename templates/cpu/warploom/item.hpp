// A work item in positions: which rows of the fused query matrix (appendix A of FlashInfer), whose
// request, and what the variant keeps per row.
#pragma once

#include <warploom/simd.hpp>
#include <warploom/variant.hpp>

namespace warploom {

// Plan buffers promise the alignment of an int only.
template <class Record>
WL_INLINE Record load_record(const int* records, int index) {
  return load_as<Record>(records + static_cast<long long>(index) * (sizeof(Record) / sizeof(int)));
}

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

  Item(const typename K::Params& params, int index)
      : p(params),
        work(load_record<typename K::WorkItem>(params.items, index)),
        segment(load_record<typename K::Segment>(params.segments, work.segment)),
        tile{segment.batch,  work.kv_head,       segment.q_len,
             segment.kv_len, params.num_q_heads, params.num_kv_heads},
        state(Variant::tile_state(params, tile)),
        rows(min_int(Config::kRows, segment.num_q * params.group_size - work.row_begin)) {
    segment.index_begin += work.kv_head * segment.index_head_stride;
    const int first_q_pos = segment.q_idx + segment.kv_len - segment.q_len;
    for (int r = 0; r < round_up(rows, kPanel); ++r) {
      const int fused = work.row_begin + min_int(r, rows - 1);
      q_pos[r] = first_q_pos + fused / p.group_size;
      q_head[r] = work.kv_head * p.group_size + fused % p.group_size;
      q_row[r] = segment.q_row + fused / p.group_size;
    }
    for (int r = 0; r < rows; ++r) row_state[r] = Variant::row_state(p, tile, state, row(r));
  }

  RowInfo row(int r) const { return {q_pos[r], q_head[r], q_row[r]}; }

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
};

}  // namespace warploom
