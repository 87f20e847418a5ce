// A work item: which fused query rows (FlashInfer, appendix A) of which request see which keys.
#pragma once

#include <warploom/arena.cuh>

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

template <class K>
struct Item {
  using C = typename K::Config;

  const typename K::Params& p;
  Arena<K> arena;
  typename K::WorkItem work;
  typename K::Segment segment;
  TileInfo tile;
  int rows;  // rows of the tile that exist, at least 1

  WL_FN Item(const typename K::Params& params, Arena<K> memory, const typename K::WorkItem& work_item,
             const typename K::Segment& segment_of_it)
      : p(params),
        arena(memory),
        work(work_item),
        segment(segment_of_it),
        tile{segment.batch,  work.kv_head,       segment.q_len,
             segment.kv_len, params.num_q_heads, params.num_kv_heads},
        rows(min(C::kRows, segment.num_q * params.group_size - work.row_begin)) {}

  WL_FN static Item read(const typename K::Params& p, Arena<K> arena, int index) {
    const auto work = load_record<typename K::WorkItem>(p.items, index);
    return {p, arena, work, load_record<typename K::Segment>(p.segments, work.segment)};
  }

  // Leaves in shared memory what the walk over keys and the output need.
  WL_FN void leave() const {
    if (threadIdx.x == 0) {
      auto& kept = arena.kept();
      kept.work = work;
      kept.segment = segment;
      kept.keys = first_token(p.k, p.k_block_stride, p.k_token_stride, p.k_head_stride);
      kept.values = first_token(p.v, p.v_block_stride, p.v_token_stride, p.v_head_stride);
    }
    for (int r = threadIdx.x; r < C::kRows; r += Sizes<K>::kThreads) arena.row(r) = locate(r);
  }
  WL_FN static Item take_up(const typename K::Params& p, Arena<K> arena) {
    return {p, arena, arena.kept().work, arena.kept().segment};
  }

  // Positions of a row; a row past the last one has the last one's, so that what functors load for it
  // exists. locate works them out, row finds them in shared memory.
  WL_FN RowInfo locate(int r) const {
    const int fused = work.row_begin + min(r, rows - 1);
    const int query = fused / p.group_size;
    return {segment.q_idx + query + segment.kv_len - segment.q_len,
            work.kv_head * p.group_size + fused - query * p.group_size, segment.q_row + query};
  }
  WL_FN RowInfo row(int r) const { return arena.row(r); }

  // Offsets of rows in elements.
  WL_FN long long q_offset(const RowInfo& row) const {
    return segment.batch * p.q_batch_stride + row.q_row * p.q_row_stride +
           row.q_head * p.q_head_stride;
  }
  WL_FN long long o_offset(const RowInfo& row) const {
    return segment.batch * p.o_batch_stride + row.q_row * p.o_row_stride +
           row.q_head * p.o_head_stride;
  }
  WL_FN long long lse_offset(const RowInfo& row) const {
    return segment.batch * p.lse_batch_stride + row.q_row * p.lse_row_stride +
           row.q_head * p.lse_head_stride;
  }

 private:
  using Element = typename C::Element;
  // Where token 0 of block 0 is, or, if storage is affine, token 0 of the request.
  WL_FN const Element* first_token(const void* tensor, long long block_stride,
                                   long long token_stride, long long head_stride) const {
    return static_cast<const Element*>(tensor) + work.kv_head * head_stride +
           segment.kv_row * token_stride + (C::kIndexed ? 0 : segment.kv_block * block_stride);
  }
};

}  // namespace warploom
