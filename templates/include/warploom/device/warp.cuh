// The lanes of a warp.
#pragma once

namespace warploom {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace warploom
