// A list's first work item and its segment, which a CTA reads first. Planners write it.
#pragma once

namespace warploom {

template <class K>
struct Opening {
  typename K::WorkItem item;
  typename K::Segment segment;
  static_assert(sizeof(typename K::WorkItem) % alignof(typename K::Segment) == 0,
                "side by side, as OPENING in scheduler/model/layout.py");
};

}  // namespace warploom
