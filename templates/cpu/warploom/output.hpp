// Where a row's result goes: to the output, or to a partial slot whose last writer merges all slots of
// the tile in ascending order, so that values never depend on who came last.
#pragma once

#include <warploom/logits.hpp>
#include <warploom/storage.hpp>
#include <warploom/transform.hpp>

namespace warploom {

// The attention state of one row: normalised output and log-sum-exp in base 2.
template <class K>
struct RowResult {
  alignas(64) float o[round_up(K::Config::kHeadDimV, kLanes)];
  float lse;
};

template <class K>
void write_output(const Item<K>& item, int r, const RowResult<K>& result) {
  using Variant = typename K::Variant;
  using Element = typename K::Config::Element;
  constexpr int kDim = K::Config::kHeadDimV;
  const float natural = Variant::kSoftmax ? result.lse * kLn2 : 0.0f;
  const float* o = result.o;
  RowResult<K> transformed;
  if constexpr (Variant::kHasOutputTransform) {
    transform<OutputSeat<Variant>, kDim>(item.p, item.tile, result.o, transformed.o, item.row[r],
                                         natural);
    o = transformed.o;
  }
  Element* out = static_cast<Element*>(item.p.o) + item.o_offset(r);
  for (int lane = 0; lane < kDim; lane += kLanes) {
    store_floats(out + lane, load_vec(o + lane), min_int(kLanes, kDim - lane));
  }
  if (item.p.lse != nullptr) item.p.lse[item.lse_offset(r)] = natural * item.p.lse_scale;
}

template <class K>
long long slot_row(const Item<K>&, int slot, int r) {
  return static_cast<long long>(slot) * K::Config::kRows + r;
}

template <class K>
void write_partial(const Item<K>& item, int r, const RowResult<K>& result) {
  const long long at = slot_row(item, item.work.slot, r);
  std::memcpy(item.p.partial_o + at * K::Config::kHeadDimV, result.o,
              K::Config::kHeadDimV * sizeof(float));
  item.p.partial_lse[at] = result.lse;
}

// The state operator of FlashInfer, section 2.2, over slots in ascending order.
template <class K>
void merge_row(const Item<K>& item, const typename K::Merge& merge, int r, RowResult<K>& result) {
  constexpr int kDim = K::Config::kHeadDimV;
  constexpr bool kSoftmax = K::Variant::kSoftmax;
  float max = -kInfinity;
  for (int i = 0; kSoftmax && i < merge.num_slots; ++i) {
    const float lse = item.p.partial_lse[slot_row(item, merge.first_slot + i, r)];
    max = lse > max ? lse : max;
  }
  float sum = 0.0f;
  std::memset(result.o, 0, sizeof(result.o));
  for (int i = 0; i < merge.num_slots; ++i) {
    const long long at = slot_row(item, merge.first_slot + i, r);
    const float base = max == -kInfinity ? 0.0f : max;
    const float weight =
        kSoftmax ? exp2_vec(broadcast(item.p.partial_lse[at] - base))[0] : 1.0f;
    const float* part = item.p.partial_o + at * kDim;
    for (int lane = 0; lane < kDim; ++lane) result.o[lane] += weight * part[lane];
    sum += weight;
  }
  const float inverse = kSoftmax ? (sum > 0.0f ? 1.0f / sum : 0.0f) : 1.0f;
  for (int lane = 0; lane < kDim; ++lane) result.o[lane] *= inverse;
  result.lse = max + __builtin_log2f(sum);
}

// Counts this item in; the last of the tile's items merges and leaves the counter at zero.
template <class K>
void arrive(const Item<K>& item) {
  const auto merge = load_record<typename K::Merge>(item.p.merges, item.work.merge);
  unsigned* counter = item.p.arrivals + item.work.merge;
  const unsigned before = __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL);
  if (before + 1 != static_cast<unsigned>(merge.num_slots)) return;
  __atomic_store_n(counter, 0u, __ATOMIC_RELAXED);
  RowResult<K> result;
  for (int r = 0; r < item.rows; ++r) {
    merge_row(item, merge, r, result);
    write_output(item, r, result);
  }
}

}  // namespace warploom
