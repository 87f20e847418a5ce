// Where results go: to the output, or to a partial slot whose last writer merges all slots of the
// tile in ascending order, so that values never depend on who came last.
#pragma once

#include <warploom/compute/logits.hpp>
#include <warploom/storage.hpp>
#include <warploom/transform.hpp>

#include <warploom/max_scores.hpp>

namespace warploom {

// Attention states of an item's rows: outputs, the factor that normalises them, the largest logit
// and the sum of probabilities relative to it. As one number, a log-sum-exp, the two could not be
// kept: beside a logit of 1e9 it has no digits left for how many keys are as large. Products may
// write rows up to a whole panel.
template <class K>
struct States {
  static constexpr int kDim = K::Config::kHeadDimV;
  static constexpr int kStride = round_up(kDim, kLanes);
  static constexpr int kRows = Item<K>::kPadded;
  alignas(64) float o[kRows * kStride];
  alignas(64) float lse[kRows];  // natural, once results are final
  float factor[kRows], largest[kRows], sum[kRows];
  Stage<K::Variant::kHasOutputTransform ? kDim : 1> stage;

  float* row(int r) { return o + r * kStride; }
  // Takes in what softmax has found of a row.
  void set_state(int r, float largest_logit, float sum_of_row) {
    constexpr bool kSoftmax = K::Variant::kSoftmax;
    largest[r] = largest_logit;
    sum[r] = sum_of_row;
    factor[r] = !kSoftmax ? 1.0f : sum_of_row == 0.0f ? 0.0f : 1.0f / sum_of_row;
  }
  // A vector of outputs as they leave.
  Vec normalised(int r, int lane) { return load_vec(row(r) + lane) * factor[r]; }
  void clear(int begin, int end) {
    std::memset(row(begin), 0, sizeof(float) * (end - begin) * kStride);
  }
  void normalise(int rows) {
    for (int r = 0; r < rows; ++r) {
      for (int lane = 0; lane < kStride; lane += kLanes) {
        store_vec(row(r) + lane, normalised(r, lane));
      }
      factor[r] = 1.0f;
    }
  }
};

template <class K>
WL_INLINE auto row_place(const Item<K>& item, int first) {
  const RowPlace place{item.q_pos + first, item.q_head + first, item.q_row + first};
  if constexpr (K::Config::kComposed) {
    return PackedRowPlace{place, item.packed.tile + first};
  } else {
    return place;
  }
}

// Natural log-sum-exp of each row; 0 without softmax.
template <class K>
void find_lse(const Item<K>& item, States<K>& states) {
  const float late = logit_scale<typename K::Variant>(item.p.sm_scale).late;
  for (int r = 0; r < item.rows; ++r) {
    states.lse[r] = !K::Variant::kSoftmax ? 0.0f
                                          : fma(states.largest[r], late * kLn2,
                                                __builtin_log2f(states.sum[r]) * kLn2);
  }
}

template <class K>
void write_max_score(const Item<K>& item, const States<K>& states, int r) {
  if constexpr (kTellsMaxScores<K>) {
    if (item.p.max_scores == nullptr) return;
    const float late = logit_scale<typename K::Variant>(item.p.sm_scale).late;
    item.p.max_scores[item.max_scores_offset(r)] =
        max_score(states.largest[r], late, states.sum[r]);
  }
}

// Replaces outputs by what output_transform makes of them.
template <class K>
void transform_outputs(const Item<K>& item, States<K>& states) {
  using Hook = OutputHook<typename K::Variant>;
  for (int first = 0; first < item.rows; first += kPanel) {
    const float* rows[kPanel];
    for (int j = 0; j < kPanel; ++j) rows[j] = states.row(min_int(first + j, item.rows - 1));
    const OutputPlace<decltype(row_place(item, first))> place{row_place(item, first),
                                                              states.lse + first};
    transform_rows<Hook, States<K>::kDim>(item.p, item.tile, place, rows, states.stage.before,
                                          states.stage.after);
    unpack_panel<States<K>::kDim>(states.stage.after, min_int(kPanel, item.rows - first),
                                  states.row(first), States<K>::kStride);
  }
}

template <class K>
void write_outputs(const Item<K>& item, States<K>& states) {
  using Element = typename K::Config::Element;
  constexpr int kDim = States<K>::kDim;
  find_lse(item, states);
  if constexpr (K::Variant::kHasOutputTransform) {
    for (int r = item.rows; r < Item<K>::kPadded; ++r) states.lse[r] = states.lse[item.rows - 1];
    states.normalise(item.rows);
    transform_outputs(item, states);
  }
  Element* const base = static_cast<Element*>(item.p.o);
  for (int r = 0; r < item.rows; ++r) {
    Element* out = base + item.o_offset(r);
    for (int lane = 0; lane < kDim; lane += kLanes) {
      store_floats(out + lane, states.normalised(r, lane), min_int(kLanes, kDim - lane));
    }
    if (item.p.lse != nullptr) item.p.lse[item.lse_offset(r)] = states.lse[r] * item.p.lse_scale;
    write_max_score(item, states, r);
  }
}

// Rows that a partial slot has room for: those of the tile, or of the largest one of all roles.
template <class Config, class = void>
inline constexpr int kSlotRows = Config::kRows;
template <class Config>
inline constexpr int kSlotRows<Config, std::void_t<decltype(Config::kSlotRows)>> =
    Config::kSlotRows;

// Row of a partial slot among all rows of all slots. Composed plans count rows, not slots.
template <class K>
long long slot_row(int slot, int r) {
  if constexpr (K::Config::kComposed) return static_cast<long long>(slot) + r;
  return static_cast<long long>(slot) * kSlotRows<typename K::Config> + r;
}

template <class K>
void write_partials(const Item<K>& item, States<K>& states) {
  constexpr int kDim = States<K>::kDim;
  for (int r = 0; r < item.rows; ++r) {
    const long long at = slot_row<K>(item.work.slot, r);
    for (int lane = 0; lane < kDim; lane += kLanes) {
      store_floats(item.p.partial_o + at * kDim + lane, states.normalised(r, lane),
                   min_int(kLanes, kDim - lane));
    }
    item.p.partial_state[2 * at] = states.largest[r];
    item.p.partial_state[2 * at + 1] = states.sum[r];
  }
}

// The state operator of FlashInfer, section 2.2, over partial rows in ascending order of keys;
// `partial_row(i)` is where the i-th one lies.
template <class K, class PartialRow>
void merge_row(const Item<K>& item, int count, const PartialRow& partial_row, int r,
               States<K>& states) {
  constexpr int kDim = States<K>::kDim;
  constexpr bool kSoftmax = K::Variant::kSoftmax;
  const float late = logit_scale<typename K::Variant>(item.p.sm_scale).late;
  const float* state = item.p.partial_state;
  float max = -kInfinity;
  for (int i = 0; kSoftmax && i < count; ++i) {
    const float other = state[2 * partial_row(i)];
    max = other > max ? other : max;
  }
  float* o = states.row(r);
  states.clear(r, r + 1);
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const long long at = partial_row(i);
    // Of equal ones none, be they infinite.
    const Vec distance = broadcast(state[2 * at] == max ? 0.0f : (state[2 * at] - max) * late);
    const float weight = kSoftmax ? state[2 * at + 1] * exp2_vec(distance)[0] : 1.0f;
    const float* part = item.p.partial_o + at * kDim;
    for (int lane = 0; lane < kDim; ++lane) o[lane] = fma(weight, part[lane], o[lane]);
    sum += weight;
  }
  states.set_state(r, max, sum);
}

// Counts this item in; the last of the tile's items merges and leaves the counter at zero.
template <class K>
void arrive(const Item<K>& item, States<K>& states) {
  const auto merge = load_record<typename K::Merge>(item.p.merges, item.work.merge);
  unsigned* counter = item.p.arrivals + item.work.merge;
  const unsigned before = __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL);
  if (before + 1 != static_cast<unsigned>(merge.num_slots)) return;
  __atomic_store_n(counter, 0u, __ATOMIC_RELAXED);
  for (int r = 0; r < item.rows; ++r) {
    const auto partial_row = [&](int i) { return slot_row<K>(merge.first_slot + i, r); };
    merge_row(item, merge.num_slots, partial_row, r, states);
  }
  write_outputs(item, states);
}

// Composed plans: merges rows first, first + 1, ... of those whose keys lie in several parts.
template <class K>
void merge_composed_rows(const Item<K>& item, int first, States<K>& states) {
  for (int r = 0; r < item.rows; ++r) {
    const auto row_merge = load_record<typename K::RowMerge>(item.p.row_merges, first + r);
    const auto partial_row = [&](int i) {
      return static_cast<long long>(item.p.contributions[row_merge.first + i]) +
             row_merge.row % kRowCode;
    };
    merge_row(item, row_merge.count, partial_row, r, states);
  }
  write_outputs(item, states);
}

}  // namespace warploom
