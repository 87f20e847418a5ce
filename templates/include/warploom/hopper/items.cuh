// How the warps of a CTA go through its work items: some open them, the others wait until they are
// open.
#pragma once

#include <warploom/hopper/lists.cuh>

namespace warploom::hopper {

// Opens the items of one list after another; the threads of `kThreads` must be whole warps.
template <class K, int kThreads>
class ItemOpener {
 public:
  WL_FN void begin(const typename K::Params& p, const List& list) {
    list_ = list;
    index_ = list.begin;
    is_first_ = true;
    next_ = load_first_opening<K>(p, list.number).item;
  }

  WL_FN bool has_next() const { return index_ < list_.end; }
  WL_FN Item<K> open_next(const typename K::Params& p, Shared<K> shared, unsigned thread) {
    auto& barriers = shared.barriers();
    // With one slot, no thread may write the next item while another opener still reads this one:
    // consumers give a slot back as soon as they have no more use for it.
    if constexpr (Shared<K>::kItemStages == 1) named_sync(kOpenersBarrier, kThreads);
    barrier_wait(&barriers.item_empty[ring_.stage], ring_.phase ^ 1);
    shared.item_stage = ring_.stage;
    const Item<K> item{p, shared};
    item.open({next_, segment(p)}, index_, thread, kThreads);
    is_first_ = false;
    named_sync(kOpenersBarrier, kThreads);  // the openers read the item, too
    barrier_arrive(&barriers.item_full[ring_.stage]);
    ring_.advance();
    ++index_;
    // This load is in flight while queries are copied.
    if (has_next()) next_ = load_record<typename K::WorkItem>(p.items, index_);
    return item;
  }

 private:
  // The segment is read when it is needed, to spare registers. The first item's segment came with
  // the item's cache line.
  WL_FN typename K::Segment segment(const typename K::Params& p) const {
    if (is_first_) return load_first_opening<K>(p, list_.number).segment;
    return load_record<typename K::Segment>(p.segments, next_.segment);
  }

  List list_;
  int index_;
  bool is_first_;
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

}  // namespace warploom::hopper
