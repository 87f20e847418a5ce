// A consumer warpgroup: 128 threads and 64 fused query rows of the CTA's tile.
//
// While the product of tile i with its values runs, the warpgroup computes the softmax of tile
// i + 1, and the products of other warpgroups fill the tensor cores meanwhile (FlashAttention-3,
// sections 3.1 and 3.2).
#pragma once

#include <warploom/hopper/absent.cuh>
#include <warploom/hopper/hook_lanes.cuh>
#include <warploom/hopper/lists.cuh>
#include <warploom/hopper/mma.cuh>
#include <warploom/hopper/output.cuh>
#include <warploom/items/merge.cuh>
#include <warploom/items/row_merges.cuh>
#include <warploom/items/stamp.cuh>

namespace warploom::hopper {

template <class K>
class Consumer {
  using S = Sizes<K>;
  using C = typename K::Config;
  using Variant = typename K::Variant;
  using Mma = WarpgroupMma<K>;

  // Two warpgroups or more issue their products by turns, so that the tensor cores multiply for one
  // while the others compute their softmax. Where they transform staged tiles themselves, they wait
  // for each other anyway.
  static constexpr int kWarpgroups = C::kRows / 64;
  static constexpr int kPingpongThreads = 2 * 128;  // of two neighbours
  static constexpr bool kTransformsQueries =
      Variant::kHasQueryTransform && !Shared<K>::kTwoPhaseQueries;
  static constexpr bool kChangesKeys = KeyStaging<K>::kChanges && !Shared<K>::kTwoPhaseKeys;
  static constexpr bool kChangesValues = ValueStaging<K>::kChanges && !Shared<K>::kTwoPhaseValues;
  // Rows that a thread transforms at a time: as many as registers hold beside the accumulators.
  template <class Hook, class Lanes = HookLanes<Hook, K>>
  static constexpr int kBatch = C::kBulk && Lanes::kHalvesVectors && !Lanes::kIsValue &&
                                        Hook::kReductions <= (Hook::kHalves ? 0 : 1)
                                    ? 2
                                    : 1;
  static constexpr bool kPingpong = kWarpgroups > 1 && !kChangesKeys && !kChangesValues;

 public:
  WL_FN Consumer(Shared<K> shared, int group)
      : shared_(shared), barriers_(shared.barriers()), warpgroup_(group), mma_(shared, group) {
    if (kPingpong && group == kWarpgroups - 1) end_pingpong();
  }

  WL_FN void run(const typename K::Params& p) {
    for_each_list<ListFollowers>(p, shared_, [&](const List& list) {
      for (int left = list.end - list.begin; left > 0; --left) run_item(p);
    });
    if constexpr (C::kComposed) merge_composed_rows(Item<K>{p, shared_});
  }

 private:
  WL_FN void run_item(const typename K::Params& p) {
    barrier_wait(&barriers_.item_full[item_ring_.stage], item_ring_.phase);
    shared_.item_stage = item_ring_.stage;
    const Item<K> item{p, shared_};
    const Stamp<K> stamp(p, item.facts().index);
    const ThreadRows<K> rows(item);
    barrier_wait(&barriers_.q_full[query_ring_.stage], query_ring_.phase);
    take_queries(item);
    typename Mma::Output output;
    Softmax<K> softmax(softmax_factor<K>(p));
    attend(item, rows, softmax, output);
    OutputWriter<K>::write(item, softmax, output);
    merge_if_last(item);
    // For the compiler: without this barrier it keeps more values that items share in registers
    // across items, and norms of 192 lanes and more spill.
    sync_warpgroup();
    barrier_arrive_warp(&barriers_.item_empty[item_ring_.stage]);
    item_ring_.advance();
    query_ring_.advance();
  }

  // Works through the keys of an item; leaves unnormalised output and softmax statistics in
  // registers.
  WL_FN void attend(const Item<K>& item, const ThreadRows<K>& rows, Softmax<K>& softmax,
                    typename Mma::Output& output) {
    if (!KeyWalk<K>(item, 0).next().exists()) return leave_zeros(output);
    const LinearBias<K> bias(item, rows);
    typename Mma::Scores scores;
    typename Mma::Probabilities probabilities;
    float rescale[Softmax<K>::kRows];
    int slot = slot_;  // of Shared::positions and column_states
    widen_keys_ahead();
    Visit visit = wait_keys(item, slot);
    begin_pingpong();
    mma_.start_scores(query_ring_.stage, ring_.stage, scores);
    end_pingpong();
    widen_ahead(columns(item, visit, slot), visit);
    Mma::template wait<0>();
    finish_scores(item, rows, bias, visit, slot, scores, softmax);
    follow(softmax, scores, rescale);  // O is empty: there is nothing to scale
    weigh(softmax, scores, probabilities);
    while (!visit.is_last()) {
      const Ring<C::kStages> values = ring_;
      ring_.advance();
      const int next_one = next_slot<K>(slot);
      const Visit next = wait_keys(item, next_one);
      begin_pingpong();
      mma_.start_scores(query_ring_.stage, ring_.stage, scores);
      wait_values(item, columns(item, visit, slot), visit, values);
      mma_.start_output(probabilities, values.stage, visit.is_first(), output);
      end_pingpong();
      widen_ahead(columns(item, next, next_one), next);
      Mma::template wait<1>();
      finish_scores(item, rows, bias, next, next_one, scores, softmax);
      const bool moved = follow(softmax, scores, rescale);
      // The product with the values before is done by now, or almost. Waiting here frees its left
      // operand, so that exponentials are rounded into these registers as they are computed. (The
      // compiler hoists the wait within its block, which the rare branch in follow() begins.)
      finish_output(values, output);
      if (moved) Softmax<K>::scale_rows(output, rescale);
      weigh(softmax, scores, probabilities);
      visit = next;
      slot = next_one;
    }
    barrier_arrive_warp(&barriers_.q_empty[query_ring_.stage]);
    wait_values(item, columns(item, visit, slot), visit, ring_);
    mma_.start_output(probabilities, ring_.stage, visit.is_first(), output);
    finish_output(ring_, output);
    ring_.advance();
    slot_ = next_slot<K>(slot);
    if constexpr (Variant::kSoftmax) softmax.finish();
  }

  // The output of an item without a visible key.
  WL_FN void leave_zeros(typename Mma::Output& output) const {
    barrier_arrive_warp(&barriers_.q_empty[query_ring_.stage]);
#pragma unroll
    for (int i = 0; i < S::kDimV / 2; ++i) (&output[0][0][0])[i] = 0.0f;
  }

  // Releases the tile's keys, and turns the finished product into what the softmax takes.
  WL_FN void finish_scores(const Item<K>& item, const ThreadRows<K>& rows,
                           const LinearBias<K>& bias, const Visit& visit, int slot,
                           typename Mma::Scores& scores, Softmax<K>& softmax) const {
    barrier_arrive_warp(&barriers_.k_empty[ring_.stage]);
    transform_scores(item, rows, columns(item, visit, slot), visit, scores);
    bias.add(item, rows, columns(item, visit, slot), scores, softmax);
  }

  // Most tiles need none of this and skip it by one jump: each jump waits for instructions.
  WL_FN static void transform_scores(const Item<K>& item, const ThreadRows<K>& rows,
                                     const Columns<K>& columns, const Visit& visit,
                                     typename Mma::Scores& scores) {
    if (Variant::kHasLogitsTransform || Variant::kRecords || !visit.is_full() ||
        !scales_late<K>(item.p)) {
      transform_logits(item, rows, columns, visit, scores);
    }
  }

  // Whether the sums before these scores must be rescaled, and by which factors.
  WL_FN static bool follow(Softmax<K>& softmax, const typename Mma::Scores& scores,
                           float (&rescale)[Softmax<K>::kRows]) {
    if constexpr (Variant::kSoftmax) return softmax.template follow<kLazyMargin>(scores, rescale);
    return false;
  }

  // Turns scores into the left operand of the product with values.
  WL_FN static void weigh(Softmax<K>& softmax, typename Mma::Scores& scores,
                          typename Mma::Probabilities& probabilities) {
    if constexpr (Variant::kSoftmax) {
      softmax.center(scores);
#pragma unroll
      for (int i = 0; i < C::kKeys / 2; ++i) {
        float& score = (&scores[0][0][0])[i];
        score = softmax.probability(i / 2 % 2, score);
      }
    }
    Mma::pack(scores, probabilities);
  }

  // Waits for the product that was started last, and releases its values.
  WL_FN void finish_output(const Ring<C::kStages>& values, typename Mma::Output& output) const {
    Mma::template wait<0>();
    Mma::fence(output[0]);
    barrier_arrive_warp(&barriers_.v_empty[values.stage]);
  }

  WL_FN Columns<K> columns(const Item<K>& item, const Visit& visit, int slot) const {
    return {item, visit, shared_.positions(slot), shared_.column_states(slot)};
  }

  WL_FN void begin_pingpong() const {
    if constexpr (kPingpong) named_sync(kPingpongBarrier + warpgroup_, kPingpongThreads);
  }
  WL_FN void end_pingpong() const {
    if constexpr (kPingpong)
      named_arrive(kPingpongBarrier + (warpgroup_ + 1) % kWarpgroups, kPingpongThreads);
  }
  WL_FN void sync_warpgroup() const { named_sync(kWarpgroupBarrier + warpgroup_, 128); }

  // Lets the tensor cores read what all consumers wrote to shared memory by ordinary instructions.
  WL_FN void publish_to_all() const {
    fence_async_proxy();
    shared_.sync();
  }
  template <class Of>
  WL_FN void change(const Item<K>& item, typename C::Element* staged,
                    const Columns<K>& columns) const {
    if constexpr (Of::kTransforms) {
      using Lanes = HookLanes<typename Of::Hook, K>;
      const unsigned thread = Lanes::kHalvesVectors ? unknown_thread(threadIdx.x) : threadIdx.x;
      const typename Lanes::States lanes(item, thread);
      transform_staged<Of, S::kThreads, kBatch<typename Of::Hook>>(item, lanes, staged, thread,
                                                                   columns);
    } else {
      widen_staged<Of, S::kThreads, C>(staged, threadIdx.x, columns);
    }
    publish_to_all();
  }

  // Widens tiles while products run, so that the next products find 16-bit numbers: the values of a
  // tile, and the keys of the tile behind it. Absent keys may become anything: the mask hides them.
  WL_FN void widen_ahead(const Columns<K>& columns, const Visit& visit) {
    if constexpr (Shared<K>::kWidensAhead) {
      const Ring<C::kStages>& ring = value_ring_;
      barrier_wait(&barriers_.v_landed[ring.stage], ring.phase);
      widen_staged<ValueStaging<K>, S::kThreads, C>(shared_.values(ring.stage), threadIdx.x,
                                                    columns);
      barrier_publish(&barriers_.v_full[ring.stage]);
      value_ring_.advance();
      if (!visit.is_last()) widen_keys_ahead();
    }
  }
  WL_FN void widen_keys_ahead() {
    if constexpr (Shared<K>::kWidensAhead) {
      barrier_wait(&barriers_.k_landed[key_ring_.stage], key_ring_.phase);
      widen_staged<KeyStaging<K>, S::kThreads, C>(shared_.keys(key_ring_.stage), threadIdx.x,
                                                  AllRows{});
      barrier_publish(&barriers_.k_full[key_ring_.stage]);
      key_ring_.advance();
    }
  }

  WL_FN void take_queries(const Item<K>& item) const {
    if constexpr (kTransformsQueries) {
      transform_queries<S::kThreads, HookLanes<QueryHook<K>, K>::kOfQueries>(
          item, shared_.queries(query_ring_.stage), unknown_thread(threadIdx.x));
      publish_to_all();
    } else if constexpr (!Shared<K>::kTwoPhaseQueries) {
      // Rows came by cp.async; the copying threads waited for them and arrived on the barrier. This
      // thread's fence orders everything that the thread has waited for before its products,
      // whichever thread wrote it.
      fence_async_proxy();
    }
  }

  // Waits for the next tile of keys, and returns which tile it is.
  WL_FN Visit wait_keys(const Item<K>& item, int slot) const {
    barrier_wait(&barriers_.k_full[ring_.stage], ring_.phase);
    const Visit visit = barriers_.visits[ring_.stage];
    if constexpr (kChangesKeys) {
      change<KeyStaging<K>>(item, shared_.keys(ring_.stage), columns(item, visit, slot));
    } else if constexpr (!C::kBulk && !Shared<K>::kTwoPhaseKeys) {
      fence_async_proxy();
    }
    return visit;
  }

  WL_FN void wait_values(const Item<K>& item, const Columns<K>& columns, const Visit& visit,
                         const Ring<C::kStages>& ring) const {
    barrier_wait(&barriers_.v_full[ring.stage], ring.phase);
    if constexpr (Shared<K>::kTwoPhaseValues) return;  // absent values are zeros
    typename C::Element* staged = shared_.values(ring.stage);
    // Unless keys are listed, only the last tile of an item lacks some: the loop over the other
    // tiles has no code for that.
    const bool may_lack_some = C::kColumnPositions || visit.is_last();
    const bool clears =
        !ValueStaging<K>::kWidens && may_lack_some && leaves_garbage(columns, visit);
    // All warpgroups write the same zeros, so that none waits for another.
    if (clears) clear_absent<128>(columns, staged);
    if constexpr (kChangesValues) {
      if (clears) shared_.sync();  // other threads read the absent rows, too
      change<ValueStaging<K>>(item, staged, columns);
    } else if constexpr (C::kBulk) {
      if (clears) {
        fence_async_proxy();
        sync_warpgroup();
      }
    } else {
      fence_async_proxy();
    }
  }

  Shared<K> shared_;
  typename Shared<K>::Barriers& barriers_;
  int warpgroup_;
  Mma mma_;
  Ring<C::kStages> ring_, key_ring_, value_ring_;  // of products; of widened keys and values
  Ring<C::kQueryStages> query_ring_;
  Ring<Shared<K>::kItemStages> item_ring_;
  int slot_ = 0;
};

}  // namespace warploom::hopper
