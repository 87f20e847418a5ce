// Queries, which producers gather for one item after another.
#pragma once

#include <warploom/hopper/shared.cuh>
#include <warploom/staging/gather.cuh>

namespace warploom::hopper {

// Gathers the fused query rows of one item after another, by kThreads threads.
template <class K, int kThreads>
class QueryProducer {
  using C = typename K::Config;
  using Copy = RowCopy<C::kRows, C::kHeadDimQk, Sizes<K>::kDimQk, Sizes<K>::kBlock, kThreads>;

  // Rows as the item lists them, from this thread's first.
  struct ListedRows {
    const Item<K>& item;
    int first;
    WL_FN long long offset(int round) const {
      return item.q_offset(item.row(first + round * Copy::kRoundRows));
    }
  };
  // The same where each round begins with the same head of a group.
  struct EvenRows {
    long long first, round_stride;
    WL_FN long long offset(int round) const { return first + round * round_stride; }
  };

 public:
  WL_FN void copy(const Item<K>& item, unsigned thread) {
    auto& barriers = item.arena.barriers();
    barrier_wait(&barriers.q_empty[ring_.stage], ring_.phase ^ 1);
    const auto& p = item.p;
    const auto from = static_cast<const typename C::Element*>(p.q) + Copy::column(thread);
    typename C::Element* const to = item.arena.queries(ring_.stage);
    const int row = Copy::first_row(thread);
    const int left = item.facts().rows - row;
    if (!C::kComposed && Copy::kRoundRows % p.group_size == 0) {
      const long long stride = Copy::kRoundRows / p.group_size * p.q_row_stride;
      copy_rows(from, EvenRows{item.q_offset(item.row(row)), stride}, left, to, thread);
    } else {
      copy_rows(from, ListedRows{item, row}, left, to, thread);
    }
    arrive_after_copies(barriers.q_copied(ring_.stage));
    ring_.advance();
  }

 private:
  template <class Rows>
  WL_FN static void copy_rows(const typename C::Element* from, const Rows& rows, int left,
                              typename C::Element* to, unsigned thread) {
#pragma unroll 4  // RowCopy::copy unrolls all: here registers would hold the places of all
    for (int round = 0; round < Copy::kRounds; ++round) {
      const bool exists = round * Copy::kRoundRows < left;
      Copy::copy_row(from + rows.offset(round), exists, to, thread, round);
    }
  }

  Ring<C::kQueryStages> ring_;
};

}  // namespace warploom::hopper
