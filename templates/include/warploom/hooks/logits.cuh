// The scalar hooks, logits_transform and logits_mask, on the accumulators of Q K^T.
#pragma once

#include <warploom/compute/turned_mma.cuh>
#include <warploom/hooks/key_bits.cuh>
#include <warploom/hooks/lane_keys.cuh>
#include <warploom/items/walk.cuh>

namespace warploom {

// What a variant hoists for the tile and for the rows whose accumulators this thread holds. Worked
// out once per work item; with 32 rows per warp, where the accumulators need the registers, once
// per tile of keys.
template <class K>
struct ThreadRows {
  using Variant = typename K::Variant;
  static constexpr int kCount = Fragments<K>::kThreadRows;

  // Rows of several requests have each their own facts of the tile.
  static constexpr bool kComposed = K::Config::kComposed;
  typename Variant::TileState tiles[kComposed ? kCount : 1];
  typename Variant::RowState state[kCount];

  WL_FN explicit ThreadRows(const Item<K>& item) {
    if constexpr (!kComposed) tiles[0] = Variant::tile_state(item.p, item.tile());
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const Row<K>& at = item.row(row(r));
      if constexpr (kComposed) tiles[r] = Variant::tile_state(item.p, item.tile_of(at));
      state[r] = Variant::row_state(item.p, item.tile_of(at), tile(r), at);
    }
  }

  WL_FN const typename Variant::TileState& tile(int r) const { return tiles[kComposed ? r : 0]; }

  // What depends on the column alone: once for all rows, unless they see it differently.
  WL_FN auto column(const Item<K>& item, const Columns<K>& columns, int key, int kv_pos) const {
    if constexpr (K::template Arena<K>::kStagesColumns) return columns.states[key];
    return Variant::col_state(item.p, item.tile(), tiles[0], kv_pos);
  }
  template <class Column>
  WL_FN Column column_of(const Item<K>& item, const Row<K>& at, int r, int kv_pos,
                         const Column& shared) const {
    if constexpr (!kComposed) return shared;
    return Variant::col_state(item.p, item.tile_of(at), tile(r), kv_pos);
  }

  // Row of the tile.
  WL_FN static int row(int r) { return Fragments<K>::row(r); }
};

// Whether the scale is left to the hooks or to the softmax.
template <class K>
WL_FN bool scales_late(const typename K::Params& p) {
  return (K::Variant::kSoftmax || K::Variant::kHasLogitsTransform) && p.sm_scale > 0.0f;
}
// What the softmax must multiply transformed logits with to have them in base 2. With 0 or infinity
// maxima would be no numbers; no factor that float32 tells from these is changed.
template <class K>
WL_FN float softmax_factor(const typename K::Params& p) {
  return ::fminf(::fmaxf(K::Variant::logits_factor(p) * kLog2e, 1e-37f), 1e37f);
}

// The first key of this thread. Where registers are for tiles, the compiler must not see that it is
// the same one each time: it would keep the numbers of all keys from tile to tile.
template <class K>
WL_FN int first_key_of_tile() {
  int key = Fragments<K>::first_key();
  if constexpr (!K::template Arena<K>::kKeepsKeys) asm volatile("" : "+r"(key));
  return key;
}

// What becomes of a logit that counts for nothing.
template <class Variant>
constexpr float kHidden = Variant::kSoftmax ? -kInfinity : 0.0f;

// What is left to ask the mask about an element of a tile of this class.
template <TileClass kClass, class Variant, class... At>
WL_FN bool sees(const At&... at) {
  if constexpr (kClass == TileClass::kPartial) return Variant::mask(at...);
  if constexpr (kClass == TileClass::kOpen) return Variant::open_part(at...);
  return true;
}

// What depends on the column alone is worked out when its turn comes.
struct NoColumns {
  template <class Make>
  WL_FN static auto column(int /*c*/, const Make& make) {
    return make();
  }
};
// Or ahead, where warps stream keys of their own. A composed tile's rows each see another.
template <class K,
          bool kAny = Sizes<K>::kSplitKeys && K::Variant::kHasColState && !K::Config::kComposed>
struct ThreadColumns : NoColumns {
  WL_FN ThreadColumns(const Item<K>&, const ThreadRows<K>&, const Columns<K>&, const Visit&) {}
};
template <class K>
class ThreadColumns<K, true> {
 public:
  WL_FN ThreadColumns(const Item<K>& item, const ThreadRows<K>& rows, const Columns<K>& columns,
                      const Visit& visit) {
    if (!K::Variant::kHasLogitsTransform && visit.is_full()) return;  // no hook is asked
    states_.read([&](int key) { return rows.column(item, columns, key, columns.kv_pos(key)); });
  }
  template <class Make>
  WL_FN auto column(int c, const Make& /*make*/) const {
    return states_.of(c);
  }

 private:
  LaneKeys<K, typename K::Variant::ColState> states_;
};

// Applies the hooks to one tile of this class. What depends on the column alone is computed once
// for all rows.
template <TileClass kClass, class K, class Ahead>
WL_FN void apply_hooks(const Item<K>& item, const ThreadRows<K>& hoisted, const Columns<K>& columns,
                       typename WarpMma<K>::Scores& scores, const Ahead& ahead) {
  using Variant = typename K::Variant;
  // Numbers of all elements would not fit registers: the compiler loads none ahead of a branch.
  constexpr bool kBranches = Variant::kLoadsElements && K::template Arena<K>::kBranchesAtLoads;
  const ThreadRows<K> rows = Sizes<K>::kRowBlocks > 1 ? ThreadRows<K>(item) : hoisted;
  const int first = first_key_of_tile<K>();
  Row<K> info[ThreadRows<K>::kCount];
#pragma unroll
  for (int r = 0; r < ThreadRows<K>::kCount; ++r) info[r] = item.row(ThreadRows<K>::row(r));
#pragma unroll
  for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
    const int step = Fragments<K>::key_step(c), key = first + step;
    if (kBranches && c % 4 == 0 && step >= columns.count) break;
    const int kv_pos = columns.kv_pos(key);
    const auto shared = ahead.column(c, [&] { return rows.column(item, columns, key, kv_pos); });
#pragma unroll
    for (int r = 0; r < ThreadRows<K>::kCount; ++r) {
      const auto column = rows.column_of(item, info[r], r, kv_pos, shared);
      float& score = Fragments<K>::score(scores, r, c);
      if constexpr (Variant::kHasLogitsTransform) {
        score = Variant::logits(item.p, item.tile_of(info[r]), rows.tile(r), info[r], rows.state[r],
                                kv_pos, column, score);
      }
      const bool is_visible = sees<kClass, Variant>(item.p, item.tile_of(info[r]), rows.tile(r),
                                                    info[r], rows.state[r], kv_pos, column);
      score = is_visible ? score : kHidden<Variant>;
    }
  }
}

// Hides what a mask of bounds hides of a tile, and keys that do not exist. Row by row: so compilers
// move seven bits to predicates at once.
template <class K>
WL_FN void hide_unseen(const Item<K>& item, const ThreadRows<K>& hoisted, const Columns<K>& columns,
                       typename WarpMma<K>::Scores& scores) {
  const ThreadRows<K> rows = Sizes<K>::kRowBlocks > 1 ? ThreadRows<K>(item) : hoisted;
  const KeyBits<K> keys(columns, first_key_of_tile<K>());
#pragma unroll
  for (int r = 0; r < ThreadRows<K>::kCount; ++r) {
    const Row<K>& at = item.row(ThreadRows<K>::row(r));
    const auto seen =
        K::Variant::key_bits(item.p, item.tile_of(at), rows.tile(r), at, rows.state[r], keys);
#pragma unroll
    for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
      float& score = Fragments<K>::score(scores, r, c);
      score = keys.has(seen, c) ? score : kHidden<typename K::Variant>;
    }
  }
}

// Hides keys that do not exist. Few tiles have any, so the others do not ask each element.
template <class K>
WL_FN void hide_absent(const Columns<K>& columns, typename WarpMma<K>::Scores& scores) {
  const int first = first_key_of_tile<K>();
#pragma unroll
  for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
    const bool exists = columns.exists(first + Fragments<K>::key_step(c));
#pragma unroll
    for (int r = 0; r < ThreadRows<K>::kCount; ++r) {
      float& score = Fragments<K>::score(scores, r, c);
      score = exists ? score : kHidden<typename K::Variant>;
    }
  }
}

// Records what rows see of one tile of this class, from scores that the hooks have yet to change.
// Rows past the last one repeat it, so they are left out as keys that do not exist are.
template <TileClass kClass, class K>
WL_FN void record_tile(const Item<K>& item, const Columns<K>& columns,
                       const typename WarpMma<K>::Scores& scores) {
  using Variant = typename K::Variant;
  const ThreadRows<K> rows(item);
  const float scale = scales_late<K>(item.p) ? item.p.sm_scale : 1.0f;
  const int first = first_key_of_tile<K>();
#pragma unroll
  for (int r = 0; r < ThreadRows<K>::kCount; ++r) {
    if (ThreadRows<K>::row(r) >= item.facts().rows) continue;
    const Row<K>& at = item.row(ThreadRows<K>::row(r));
#pragma unroll
    for (int c = 0; c < Fragments<K>::kThreadKeys; ++c) {
      const int key = first + Fragments<K>::key_step(c);
      if (!columns.exists(key)) continue;
      const int kv_pos = columns.kv_pos(key);
      const auto column =
          rows.column_of(item, at, r, kv_pos, rows.column(item, columns, key, kv_pos));
      if (sees<kClass, Variant>(item.p, item.tile_of(at), rows.tile(r), at, rows.state[r], kv_pos,
                                column)) {
        Variant::record(item.p, item.tile_of(at), at, kv_pos,
                        Fragments<K>::score(scores, r, c) * scale);
      }
    }
  }
}
template <class K>
WL_FN void record_logits(const Item<K>& item, const Columns<K>& columns, const Visit& visit,
                         const typename WarpMma<K>::Scores& scores) {
  if (KeyWalk<K>::kDistinguishesOpen && visit.is(TileClass::kOpen)) {
    record_tile<TileClass::kOpen>(item, columns, scores);
  } else if (K::Variant::kHasLogitsMask && !visit.is_full()) {
    record_tile<TileClass::kPartial>(item, columns, scores);
  } else {
    record_tile<TileClass::kFull>(item, columns, scores);
  }
}

// Asks all elements of a tile of this visit's class, and hides keys that do not exist.
template <class K, class Ahead>
WL_FN void ask_elements(const Item<K>& item, const ThreadRows<K>& rows, const Columns<K>& columns,
                        const Visit& visit, typename WarpMma<K>::Scores& scores,
                        const Ahead& ahead) {
  using Variant = typename K::Variant;
  if (KeyWalk<K>::kDistinguishesOpen && visit.is(TileClass::kOpen)) {
    apply_hooks<TileClass::kOpen>(item, rows, columns, scores, ahead);
  } else if (Variant::kHasLogitsMask && !visit.is_full()) {
    apply_hooks<TileClass::kPartial>(item, rows, columns, scores, ahead);
  } else if constexpr (Variant::kHasLogitsTransform) {
    apply_hooks<TileClass::kFull>(item, rows, columns, scores, ahead);
  }
  if (!visit.is_full() && columns.may_lack_some()) hide_absent(columns, scores);
}

template <class K, class Ahead = NoColumns>
WL_FN void transform_logits(const Item<K>& item, const ThreadRows<K>& rows,
                            const Columns<K>& columns, const Visit& visit,
                            typename WarpMma<K>::Scores& scores, const Ahead& ahead = {}) {
  using Variant = typename K::Variant;
  if (!scales_late<K>(item.p)) {
#pragma unroll
    for (int i = 0; i < int(sizeof(scores) / sizeof(float)); ++i) {
      (&scores[0][0][0])[i] *= item.p.sm_scale;
    }
  }
  if constexpr (Variant::kRecords) record_logits(item, columns, visit, scores);
  if constexpr (kHasKeyBits<K>) {
    if constexpr (Variant::kHasLogitsTransform) {
      apply_hooks<TileClass::kFull>(item, rows, columns, scores, ahead);
    }
    if (!visit.is_full()) hide_unseen(item, rows, columns, scores);
  } else {
    ask_elements(item, rows, columns, visit, scores, ahead);
  }
}

}  // namespace warploom
