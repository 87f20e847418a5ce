// Layout of the CTA's dynamic shared memory, by the table of codegen/attention/hopper.py.
#pragma once

#include <warploom/hopper/barrier.cuh>
#include <warploom/hopper/wide_tiles.cuh>
#include <warploom/items/lists.cuh>
#include <warploom/items/walk.cuh>
#include <warploom/staging/arena.cuh>

namespace warploom::hopper {

// Whether a separate warpgroup (the transformer) transforms staged tiles; else consumers do.
template <class K>
constexpr bool kHasTransformer = K::Config::kTransformer;

// The slab has one row for every kRowThreads consumer threads: output leaves the registers through
// it.
template <class K>
struct Shared {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using Element = typename C::Element;
  using At = typename C::SharedMemory;
  using WideKeys = typename KeyStaging<K>::Wide;
  using WideValues = typename ValueStaging<K>::Wide;

  static_assert(!kHasTransformer<K> || Variant::kHasQueryTransform || KeyStaging<K>::kChanges ||
                    ValueStaging<K>::kChanges,
                "a group that transforms has something to do");

  // With two tiles of queries, the producer copies the next item's queries while the consumers are
  // at the item before. It opens an item one earlier, since that takes three loads in a row.
  static constexpr int kItemStages = C::kQueryStages == 1 ? 1 : C::kQueryStages + 1;
  struct StagedItem {
    ItemFacts<K> facts;
    Row<K> rows[C::kRows];
  };
  // Without a transformer, consumers widen 8-bit tiles a tile ahead, if no hook transforms them.
  static constexpr bool kWidensAhead = S::kNarrowKv && !kHasTransformer<K> &&
                                       !KeyStaging<K>::kTransforms && !ValueStaging<K>::kTransforms;
  // A warpgroup widens a tile before it has released the tile in front.
  static_assert(!kWidensAhead || C::kStages >= 2, "with one stage it would wait for itself");
  // A tile that the transformer changes, or that is widened ahead, has two phases: it has landed
  // before it is full.
  static constexpr bool kTwoPhaseQueries = kHasTransformer<K> && Variant::kHasQueryTransform;
  // Where keys are listed, the transformer learns the values' positions with the keys.
  static constexpr bool kTwoPhaseKeys =
      kWidensAhead ||
      (kHasTransformer<K> &&
       (KeyStaging<K>::kChanges || (ValueStaging<K>::kChanges && C::kBulk && C::kColumnPositions)));
  static constexpr bool kTwoPhaseValues =
      kWidensAhead || (kHasTransformer<K> && ValueStaging<K>::kChanges);
  // Barriers of rings of items and tiles. The keys' producer writes to `visits` which tile they
  // are.
  struct Barriers {
    Barrier item_full[kItemStages], item_empty[kItemStages];
    Barrier q_landed[C::kQueryStages], q_full[C::kQueryStages], q_empty[C::kQueryStages];
    Barrier k_landed[C::kStages], k_full[C::kStages], k_empty[C::kStages];
    Barrier v_landed[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    Visit visits[round_up(C::kStages, 2)];
    // The barriers that copies arrive on.
    WL_FN Barrier* q_copied(int i) { return kTwoPhaseQueries ? q_landed + i : q_full + i; }
    WL_FN Barrier* k_copied(int i) { return kTwoPhaseKeys ? k_landed + i : k_full + i; }
    WL_FN Barrier* v_copied(int i) { return kTwoPhaseValues ? v_landed + i : v_full + i; }
  };

  static constexpr int kSlabStride = S::kDimV + 8;
  static constexpr int kSlabRows = S::kThreads / S::kRowThreads;
  // Zeroing surplus values of a tensor copy costs more than letting the mask hide their keys.
  static constexpr bool kMaskHidesRest = true;
  // While one warpgroup waits for numbers that hooks load, another multiplies.
  static constexpr bool kBranchesAtLoads = true;
  // Whether a thread keeps the numbers of its keys from tile to tile. With claimed lists too few
  // registers were left for soft-cap then: it took 1.1 times as long.
  static constexpr bool kKeepsKeys = !ClaimsLists<K>::kDoes;
  // The per-key state of hooks on logits is computed once for all rows; not for composed tiles,
  // whose rows each need another.
  static constexpr bool kStagesColumns = Variant::kHasColState && !C::kComposed;
  using ColState = typename Variant::ColState;
  // Positions and column states are read after the tile's keys were released.
  static constexpr int kSlots = C::kColumnPositions || kStagesColumns ? C::kStages + 1 : 0;
  static constexpr int kBytes = At::kBytes;

  static_assert(At::kQueriesBytes == C::kQueryStages * QueryTile<K>::kBytes);
  static_assert(At::kKeysBytes == C::kStages * WideKeys::kBytes);
  static_assert(At::kValuesBytes == C::kStages * WideValues::kBytes);
  static_assert(At::kSlabBytes == kSlabRows * kSlabStride * 4);
  static_assert(At::kPositionsBytes == C::kColumnPositions * kSlots * C::kKeys * 4);
  static_assert(At::kColumnsBytes == kStagesColumns * kSlots * C::kKeys * int(sizeof(ColState)));
  static_assert(At::kItemsBytes == kItemStages * int(sizeof(StagedItem)));
  static_assert(At::kBarriersBytes == sizeof(Barriers));

  char* base;          // aligned to 1024 bytes, as swizzled tiles need
  int item_stage = 0;  // of the item that this view is for

  WL_FN Element* queries(int stage) const {
    return reinterpret_cast<Element*>(base + At::kQueries) + stage * QueryTile<K>::kElements;
  }
  WL_FN Element* keys(int stage) const {
    return reinterpret_cast<Element*>(base + At::kKeys) + stage * WideKeys::kElements;
  }
  WL_FN Element* values(int stage) const {
    return reinterpret_cast<Element*>(base + At::kValues) + stage * WideValues::kElements;
  }
  // Where copies land.
  WL_FN Element* landed_keys(int stage) const { return keys(stage) + KeyStaging<K>::kLandsAt; }
  WL_FN Element* landed_values(int stage) const {
    return values(stage) + ValueStaging<K>::kLandsAt;
  }
  WL_FN float* slab_row(int row) const {
    return reinterpret_cast<float*>(base + At::kSlab) + row * kSlabStride;
  }
  // kv_pos of each key of a staged tile, -1 where there is none.
  WL_FN int* positions(int slot) const {
    return reinterpret_cast<int*>(base + At::kPositions) + slot * C::kKeys;
  }
  // Per-key state of hooks on logits, for a staged tile.
  WL_FN ColState* column_states(int slot) const {
    return reinterpret_cast<ColState*>(base + At::kColumns) + slot * C::kKeys;
  }
  WL_FN ItemFacts<K>& facts() const { return staged_item().facts; }
  WL_FN Row<K>& row(int r) const { return staged_item().rows[r]; }
  // Volatile, to be read anew each time: registers are for tiles.
  WL_FN volatile ClaimState& claim_state() const { return claim_state_in<K>(base); }
  WL_FN Barriers& barriers() const { return *reinterpret_cast<Barriers*>(base + At::kBarriers); }

  // Waits for all consumer threads.
  WL_FN static void sync() { named_sync(kConsumersBarrier, S::kThreads); }

 private:
  WL_FN StagedItem& staged_item() const {
    return reinterpret_cast<StagedItem*>(base + At::kItems)[item_stage];
  }
};

// The next slot of Shared::positions and column_states.
template <class K>
WL_FN int next_slot(int slot) {
  constexpr int kSlots = Shared<K>::kSlots;
  return kSlots == 0 || slot + 1 == kSlots ? 0 : slot + 1;
}

}  // namespace warploom::hopper
