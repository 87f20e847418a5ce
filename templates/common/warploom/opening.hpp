// What a CTA reads first, as planners write it and kernels read it.
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
