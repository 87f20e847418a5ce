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
  RowInfo row[Config::kRows];
  typename Variant::RowState row_state[Config::kRows];

  Item(const typename K::Params& params, int index)
      : p(params),
        work(load_record<typename K::WorkItem>(params.items, index)),
        segment(load_record<typename K::Segment>(params.segments, work.segment)),
        tile{segment.batch,  work.kv_head,       segment.q_len,
             segment.kv_len, params.num_q_heads, params.num_kv_heads},
        state(Variant::tile_state(params, tile)),
        rows(min_int(Config::kRows, segment.num_q * params.group_size - work.row_begin)) {
    for (int r = 0; r < rows; ++r) {
      row[r] = {first_q_pos() + query_of(r), head_of(r), segment.q_row + query_of(r)};
      row_state[r] = Variant::row_state(p, tile, state, row[r]);
    }
  }

  // Position ranges of rows [begin, end), for the tile classes.
  Range q_pos(int begin, int end) const { return {row[begin].q_pos, row[end - 1].q_pos + 1}; }
  Range q_head(int begin, int end) const {
    if (row[begin].q_pos == row[end - 1].q_pos) return {row[begin].q_head, row[end - 1].q_head + 1};
    return {work.kv_head * p.group_size, (work.kv_head + 1) * p.group_size};
  }

  // Element offsets of a row; all 64-bit.
  long long q_offset(int r) const {
    return segment.batch * p.q_batch_stride + row[r].q_row * p.q_row_stride +
           row[r].q_head * p.q_head_stride;
  }
  long long o_offset(int r) const {
    return segment.batch * p.o_batch_stride + row[r].q_row * p.o_row_stride +
           row[r].q_head * p.o_head_stride;
  }
  long long lse_offset(int r) const {
    return segment.batch * p.lse_batch_stride + row[r].q_row * p.lse_row_stride +
           row[r].q_head * p.lse_head_stride;
  }

 private:
  int query_of(int r) const { return (work.row_begin + r) / p.group_size; }
  int head_of(int r) const {
    return work.kv_head * p.group_size + (work.row_begin + r) % p.group_size;
  }
  int first_q_pos() const { return segment.q_idx + segment.kv_len - segment.q_len; }
};

}  // namespace warploom
