// What a CTA reads first, as planners write it and kernels read it.
#pragma once

namespace warploom {

template <class K>
struct Opening {
  typename K::WorkItem item;
  typename K::Segment segment;
};

}  // namespace warploom
