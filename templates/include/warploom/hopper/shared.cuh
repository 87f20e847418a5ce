// What lies where in the CTA's dynamic shared memory, by the table of codegen/attention/hopper.py.
#pragma once

#include <warploom/hopper/barrier.cuh>
#include <warploom/hopper/wide_tiles.cuh>
#include <warploom/items/lists.cuh>
#include <warploom/items/walk.cuh>
#include <warploom/staging/arena.cuh>

namespace warploom::hopper {

// Whether a warpgroup of its own transforms what was staged; else consumers do.
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

  // With two tiles of queries, the producer copies those of the next item while the consumers are
  // at the one before. An item is open one earlier, for that takes three loads in a row.
  static constexpr int kItemStages = C::kQueryStages == 1 ? 1 : C::kQueryStages + 1;
  struct StagedItem {
    ItemFacts<K> facts;
    Row<K> rows[C::kRows];
  };
  // Without such a group consumers widen 8-bit keys and values a tile ahead, if no hook transforms
  // either.
  static constexpr bool kWidensAhead = S::kNarrowKv && !kHasTransformer<K> &&
                                       !KeyStaging<K>::kTransforms && !ValueStaging<K>::kTransforms;
  // A group widens ahead before it has told that it is done with the tile in front.
  static_assert(!kWidensAhead || C::kStages >= 2, "with one stage it would wait for itself");
  // A tile that a group changes, or that is widened ahead, has landed before it is full.
  static constexpr bool kLandsQueries = kHasTransformer<K> && Variant::kHasQueryTransform;
  // Where keys are listed, who transforms values learns their positions with the keys.
  static constexpr bool kLandsKeys =
      kWidensAhead ||
      (kHasTransformer<K> &&
       (KeyStaging<K>::kChanges || (ValueStaging<K>::kChanges && C::kBulk && C::kColumnPositions)));
  static constexpr bool kLandsValues =
      kWidensAhead || (kHasTransformer<K> && ValueStaging<K>::kChanges);
  // Of a ring of tiles, and of items. Who copies keys says in `visits` which tile they are.
  struct Barriers {
    Barrier item_full[kItemStages], item_empty[kItemStages];
    Barrier q_landed[C::kQueryStages], q_full[C::kQueryStages], q_empty[C::kQueryStages];
    Barrier k_landed[C::kStages], k_full[C::kStages], k_empty[C::kStages];
    Barrier v_landed[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    Visit visits[round_up(C::kStages, 2)];
    // What copies arrive on.
    WL_FN Barrier* q_copied(int i) { return kLandsQueries ? q_landed + i : q_full + i; }
    WL_FN Barrier* k_copied(int i) { return kLandsKeys ? k_landed + i : k_full + i; }
    WL_FN Barrier* v_copied(int i) { return kLandsValues ? v_landed + i : v_full + i; }
  };

  static constexpr int kSlabStride = S::kDimV + 8;
  static constexpr int kSlabRows = S::kThreads / S::kRowThreads;
  // To make surplus values of a tensor copy zeros costs more than to let the mask hide their keys.
  static constexpr bool kMaskHidesRest = true;
  // While a group waits for numbers of its elements, another multiplies.
  static constexpr bool kBranchesAtLoads = true;
  // Numbers of a thread's keys from tile to tile. Beside lists they left soft-cap too few
  // registers: it took 1.1 times as long.
  static constexpr bool kKeepsKeys = !ClaimsLists<K>::kDoes;
  // What the hooks on logits hoist for each key is worked out once for all rows. A composed tile's
  // rows each see another.
  static constexpr bool kStagesColumns = Variant::kHasColState && !C::kComposed;
  using ColState = typename Variant::ColState;
  // Both are read after the tile's keys were released.
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
  // Where copies go.
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
  // What the hooks on logits keep of each key of a staged tile.
  WL_FN ColState* column_states(int slot) const {
    return reinterpret_cast<ColState*>(base + At::kColumns) + slot * C::kKeys;
  }
  WL_FN ItemFacts<K>& facts() const { return staged_item().facts; }
  WL_FN Row<K>& row(int r) const { return staged_item().rows[r]; }
  // Read anew each time: registers are for tiles.
  WL_FN volatile Drawn& drawn() const { return drawn_in<K>(base); }
  WL_FN Barriers& barriers() const { return *reinterpret_cast<Barriers*>(base + At::kBarriers); }

  // Waits for all consumer threads.
  WL_FN static void sync() { named_sync(kConsumersBarrier, S::kThreads); }

 private:
  WL_FN StagedItem& staged_item() const {
    return reinterpret_cast<StagedItem*>(base + At::kItems)[item_stage];
  }
};

// Slot of Shared::positions and column_states for one tile after another.
template <class K>
WL_FN int next_slot(int slot) {
  constexpr int kSlots = Shared<K>::kSlots;
  return kSlots == 0 || slot + 1 == kSlots ? 0 : slot + 1;
}

}  // namespace warploom::hopper
