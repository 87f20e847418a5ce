// The producer group: opens work items, and copies queries, keys and values to shared memory ahead
// of the consumers.
//
// Bulk mode (storage in blocks of 8 tokens and more, or affine): one warp issues tensor copies of
// keys, one those of values, and two open items and gather queries. These wait for no room for
// keys, so that the next item is open long before its turn; unless they also work out what hooks on
// logits keep of each key, which they put beside the keys. Gather mode (smaller blocks): all four
// warps do everything together.
#pragma once

#include <warploom/hopper/shared.cuh>

namespace warploom::hopper {

constexpr int kProducerThreads = 128;
constexpr int kBulkQueryThreads = 64;

// Opens one item after another; the threads of `kThreads` must be whole warps.
template <class K, int kThreads>
class ItemOpener {
 public:
  WL_FN ItemOpener(const typename K::Params& p, int first, int end)
      : index_(first), end_(end), next_(load_first_opening<K>(p).item) {}

  WL_FN bool has_next() const { return index_ < end_; }
  WL_FN Item<K> open_next(const typename K::Params& p, Shared<K> shared, unsigned thread) {
    auto& barriers = shared.barriers();
    // With one slot, nobody may write the next item while another thread reads this one: consumers
    // give a slot back as soon as they have no more use for it.
    if constexpr (Shared<K>::kItemStages == 1) named_sync(kOpenersBarrier, kThreads);
    barrier_wait(&barriers.item_empty[ring_.stage], ring_.phase ^ 1);
    shared.item_stage = ring_.stage;
    const Item<K> item{p, shared};
    item.open({next_, segment(p)}, index_, thread, kThreads);
    is_first_ = false;
    named_sync(kOpenersBarrier, kThreads);  // they read what they opened
    barrier_arrive(&barriers.item_full[ring_.stage]);
    ring_.advance();
    ++index_;
    // On its way while queries are copied.
    if (has_next()) next_ = load_record<typename K::WorkItem>(p.items, index_);
    return item;
  }

 private:
  // Read when it is needed, to spare registers; the first one came with its item's cache line.
  WL_FN typename K::Segment segment(const typename K::Params& p) const {
    if (is_first_) return load_first_opening<K>(p).segment;
    return load_record<typename K::Segment>(p.segments, next_.segment);
  }

  int index_, end_;
  bool is_first_ = true;
  typename K::WorkItem next_;
  Ring<Shared<K>::kItemStages> ring_;
};

// The items that another warp opens, one after another.
template <class K>
class OpenedItems {
 public:
  WL_FN OpenedItems(const typename K::Params& p, Shared<K> shared) : p_(p), shared_(shared) {}

  WL_FN Item<K> next() {
    barrier_wait(&shared_.barriers().item_full[ring_.stage], ring_.phase);
    shared_.item_stage = ring_.stage;
    ring_.advance();
    return {p_, shared_};
  }

 private:
  const typename K::Params& p_;
  Shared<K> shared_;
  Ring<Shared<K>::kItemStages> ring_;
};

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
#pragma unroll 4  // not all, as RowCopy::copy does: registers would hold the places of all rounds
    for (int round = 0; round < Copy::kRounds; ++round) {
      const bool exists = round * Copy::kRoundRows < left;
      Copy::copy_row(from + rows.offset(round), exists, to, thread, round);
    }
  }

  Ring<C::kQueryStages> ring_;
};

// Position of the key at a place of a list of blocks; -1 past its end.
template <class K>
WL_FN int listed_position(const Item<K>& item, int place) {
  const int block = block_of(item, place);
  return block < 0 ? -1 : block * K::Config::kBlockKv + place % K::Config::kBlockKv;
}

// Works out what the hooks on logits keep of each key, for the two warps that copy queries.
template <class K>
class ColumnProducer {
  using C = typename K::Config;
  using Variant = typename K::Variant;
  static constexpr int kOwn = (C::kKeys + kBulkQueryThreads - 1) / kBulkQueryThreads;  // keys

 public:
  WL_FN void produce(const Item<K>& item, unsigned thread) {
    auto& barriers = item.arena.barriers();
    const auto of_tile = Variant::tile_state(item.p, item.tile());
    KeyWalk<K> walk(item, 0);
    for (Visit visit = walk.next(); visit.exists(); visit = walk.next()) {
      // What is loaded is on its way before there is room.
      const bool is_read = Variant::kHasLogitsTransform || !visit.is_full();
      typename Variant::ColState states[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int key = thread + i * kBulkQueryThreads;
        if (is_read && key < C::kKeys) {
          states[i] = Variant::col_state(item.p, item.tile(), of_tile, position(item, visit, key));
        }
      }
      barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int key = thread + i * kBulkQueryThreads;
        if (is_read && key < C::kKeys) item.arena.column_states(slot_)[key] = states[i];
      }
      barrier_arrive(&barriers.k_full[ring_.stage]);
      slot_ = next_slot<K>(slot_);
      ring_.advance();
    }
  }

 private:
  WL_FN static int position(const Item<K>& item, const Visit& visit, int key) {
    if constexpr (C::kColumnPositions) return listed_position(item, visit.begin() + key);
    return item.facts().kv_pos + visit.begin() + key;
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

// Tensor copies of keys or of values, issued by one warp: keys never wait for room for values.
template <class K, bool kOfValues>
class BulkProducer {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Element = typename C::Element;
  // Tokens of one copy: a whole tile, or what one block has of it.
  static constexpr int kBoxTokens = C::kIndexed && C::kBlockKv < C::kKeys ? C::kBlockKv : C::kKeys;
  static_assert(C::kKeys % kBoxTokens == 0 && kBoxTokens % 8 == 0,
                "a box begins on a whole swizzle pattern of 8 rows");

 public:
  WL_FN void copy(const Item<K>& item) {
    const int lane = threadIdx.x % kWarpSize, end = item.facts().places.end;
    const Shared<K> shared = item.arena;
    auto& barriers = shared.barriers();
    KeyWalk<K> walk(item, 0);
    Visit next = walk.next().as_first();
    while (next.exists()) {
      const Visit visit = next;
      next = walk.next();
      const int boxes = (min(end - visit.begin(), C::kKeys) + kBoxTokens - 1) / kBoxTokens;
      if constexpr (kOfValues) {
        barrier_wait(&barriers.v_empty[ring_.stage], ring_.phase ^ 1);
        copy_tile<S::kDimV>(item, &item.p.v_map, barriers.v_copied(ring_.stage), visit, boxes,
                            shared.values(ring_.stage), lane);
      } else {
        barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
        if constexpr (C::kColumnPositions) write_positions(item, visit, lane);
        if (lane == 0) barriers.visits[ring_.stage] = visit.before(next);
        copy_tile<S::kDimQk>(item, &item.p.k_map, barriers.k_copied(ring_.stage), visit, boxes,
                             shared.keys(ring_.stage), lane);
      }
      ring_.advance();
    }
  }

 private:
  template <int kDim>
  WL_FN static void copy_tile(const Item<K>& item, const void* map, Barrier* full,
                              const Visit& visit, int boxes, Element* to, int lane) {
    constexpr int kPanels = kDim / S::kBlock;
    if (lane == 0) barrier_arrive_expect(full, boxes * kBoxTokens * kDim * int(sizeof(Element)));
    __syncwarp();
    for (int i = lane; i < boxes * kPanels; i += kWarpSize) {
      const int panel = i / boxes, box = i % boxes;
      const int place = visit.begin() + box * kBoxTokens;
      int token = item.facts().kv_row + place, block = item.facts().kv_block;
      if constexpr (C::kIndexed) {
        block = __ldg(item.p.indices + item.facts().index_begin + place / C::kBlockKv);
        token = place % C::kBlockKv;
        if constexpr (C::kColumnPositions) {  // one sequence of tokens, not blocks with an edge
          token += item.facts().kv_row + block * C::kBlockKv;
          block = 0;
        }
      }
      Element* target = to + panel * C::kKeys * S::kBlock + box * kBoxTokens * S::kBlock;
      tma_load(map, full, target, panel * S::kBlock, token, item.tile().kv_head, block);
    }
  }
  WL_FN void write_positions(const Item<K>& item, const Visit& visit, int lane) {
    for (int key = lane; key < C::kKeys; key += kWarpSize) {
      item.arena.positions(slot_)[key] = listed_position(item, visit.begin() + key);
    }
    slot_ = next_slot<K>(slot_);
    barrier_arrive(item.arena.barriers().k_copied(ring_.stage));
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

// Rows from anywhere, by cp.async; absent rows become zeros.
template <class K>
class GatherProducer {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using CopyKeys = RowCopy<C::kKeys, C::kHeadDimQk, S::kDimQk, S::kBlock, kProducerThreads>;
  using CopyValues = RowCopy<C::kKeys, C::kHeadDimV, S::kDimV, S::kBlock, kProducerThreads>;
  static_assert(CopyKeys::kRounds * CopyKeys::kWarpRows <= kWarpSize,
                "one lane looks up each row that a warp copies");

 public:
  WL_FN void copy(const Item<K>& item, unsigned thread) {
    const auto& p = item.p;
    const Shared<K> shared = item.arena;
    auto& barriers = shared.barriers();
    const int row = CopyKeys::looked_up_row(thread);
    const auto of_tile = Variant::tile_state(p, item.tile());
    KeyWalk<K> walk(item, 0);
    Visit visit = walk.next().as_first();
    int block = block_of(item, visit.begin() + row);
    while (visit.exists()) {
      const Visit next = walk.next();
      const int next_block = block_of(item, next.begin() + row);  // a tile ahead
      const int token = (visit.begin() + row) % C::kBlockKv, at = TokenSlots<C>::of(block);
      const int kv_pos = C::kColumnPositions ? (block < 0 ? -1 : block * C::kBlockKv + token)
                                             : item.facts().kv_pos + visit.begin() + row;
      typename Variant::ColState state;
      if constexpr (Shared<K>::kStagesColumns) {
        state = Variant::col_state(p, item.tile(), of_tile, kv_pos);
      }
      barrier_wait(&barriers.k_empty[ring_.stage], ring_.phase ^ 1);
      if (row < C::kKeys) {
        if constexpr (C::kColumnPositions) shared.positions(slot_)[row] = kv_pos;
        if constexpr (Shared<K>::kStagesColumns) shared.column_states(slot_)[row] = state;
      }
      if (thread == 0) barriers.visits[ring_.stage] = visit.before(next);
      slot_ = next_slot<K>(slot_);
      const ShuffledRows<CopyKeys> keys{
          at < 0 ? kAbsent : at * p.k_block_stride + token * p.k_token_stride, thread};
      CopyKeys::copy(item.facts().keys + CopyKeys::column(thread), keys, shared.keys(ring_.stage),
                     thread);
      arrive(barriers.k_copied(ring_.stage));
      barrier_wait(&barriers.v_empty[ring_.stage], ring_.phase ^ 1);
      const ShuffledRows<CopyValues> values{
          at < 0 ? kAbsent : at * p.v_block_stride + token * p.v_token_stride, thread};
      CopyValues::copy(item.facts().values + CopyValues::column(thread), values,
                       shared.values(ring_.stage), thread);
      arrive(barriers.v_copied(ring_.stage));
      ring_.advance();
      visit = next;
      block = next_block;
    }
  }

 private:
  // Once for the copies, when they are complete, and once for ordinary stores.
  WL_FN static void arrive(Barrier* full) {
    arrive_after_copies(full);
    barrier_arrive(full);
  }

  Ring<C::kStages> ring_;
  int slot_ = 0;
};

// Arrivals that complete a phase of the barriers.
template <class K>
struct Arrivals {
  using Variant = typename K::Variant;
  static constexpr bool kBulk = K::Config::kBulk;
  static constexpr int kColumnThreads = kBulk && Shared<K>::kStagesColumns ? kBulkQueryThreads : 0;
  static constexpr int kItem = kBulk ? kBulkQueryThreads : kProducerThreads;
  static constexpr int kConsumers = K::Config::kRows / 64 * kTellers<128>;
  static constexpr int kTransformer = kHasTransformer<K> ? kTellers<128> : 0;
  // Of items: besides them, a warp each for keys and for values.
  static constexpr int kReaders = kConsumers + kTransformer + (kBulk ? 2 * kTellers<kWarpSize> : 0);
  static constexpr int kQueries = kBulk ? kBulkQueryThreads : kProducerThreads;
  static constexpr int kValues = kBulk ? 1 : 2 * kProducerThreads;
  // Each lane that wrote positions arrives for itself.
  static constexpr int kKeys = kValues + (kBulk && K::Config::kColumnPositions ? kWarpSize : 0);
  // On the barriers that consumers wait for.
  static constexpr int kFullQueries = Shared<K>::kLandsQueries ? kTransformer : kQueries;
  static constexpr int kFullKeys = (Shared<K>::kLandsKeys ? kTransformer : kKeys) + kColumnThreads;
  static constexpr int kFullValues = Shared<K>::kLandsValues ? kTransformer : kValues;
};

// Copies keys or values of the items that others open, by one warp.
template <bool kOfValues, class K>
WL_FN void produce_in_bulk(const typename K::Params& p, Shared<K> shared, int items) {
  BulkProducer<K, kOfValues> tokens;
  OpenedItems<K> opened{p, shared};
  for (; items > 0; --items) {
    const Item<K> item = opened.next();
    tokens.copy(item);
    barrier_tell(&shared.barriers().item_empty[item.arena.item_stage]);
  }
}

template <class K>
WL_FN void produce(const typename K::Params& p, Shared<K> shared) {
  const unsigned thread = threadIdx.x % kProducerThreads;
  const int begin = __ldg(p.cta_indptr + blockIdx.x), end = __ldg(p.cta_indptr + blockIdx.x + 1);
  if constexpr (!K::Config::kBulk) {
    ItemOpener<K, kProducerThreads> items(p, begin, end);
    QueryProducer<K, kProducerThreads> queries;
    GatherProducer<K> tokens;
    while (items.has_next()) {
      const Item<K> item = items.open_next(p, shared, thread);
      queries.copy(item, thread);
      tokens.copy(item, thread);
    }
  } else if (thread < kWarpSize) {
    produce_in_bulk<false>(p, shared, end - begin);
  } else if (thread < 2 * kWarpSize) {
    produce_in_bulk<true>(p, shared, end - begin);
  } else {
    ItemOpener<K, kBulkQueryThreads> items(p, begin, end);
    QueryProducer<K, kBulkQueryThreads> queries;
    ColumnProducer<K> columns;
    while (items.has_next()) {
      const Item<K> item = items.open_next(p, shared, thread - 2 * kWarpSize);
      queries.copy(item, thread - 2 * kWarpSize);
      if constexpr (Shared<K>::kStagesColumns) columns.produce(item, thread - 2 * kWarpSize);
    }
  }
}

}  // namespace warploom::hopper
