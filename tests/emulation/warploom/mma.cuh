// Stands in for the device's header of that name: there are no tensor cores.
#pragma once

#include <warploom/tile.cuh>

namespace warploom {

template <class K>
struct WarpMma;

}  // namespace warploom
