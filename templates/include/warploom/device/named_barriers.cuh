// Hardware barriers of a CTA by number: 0 is __syncthreads, and 15 more have a use each.
#pragma once

namespace warploom {

// Of a tile that streams: all its threads but the prefetch warp. In a launch of two roles the CTA
// meets (__syncthreads) before threads that stream become consumers of staged tiles, so these may
// use the same numbers.
constexpr int kComputingBarrier = 1;
constexpr int kConsumersBarrier = 1;   // of staged tiles: all consumer threads
constexpr int kListEndBarrier = 2;     // of a decode tile: all keys of a list are computed with
constexpr int kPingpongBarrier = 2;    // + group: that group may issue its products
constexpr int kWarpgroupBarrier = 5;   // + group: the 128 threads of a group
constexpr int kOpenersBarrier = 8;     // those of the producer group that open items
constexpr int kTransformBarrier = 9;   // the group that transforms staged tiles
constexpr int kListBarrier = 10;       // those that draw lists of items, between two of them
constexpr int kRoleBarrier = 11;       // all threads of a decode tile
constexpr int kListDrawnBarrier = 12;  // + place: a list is drawn
constexpr int kListReadBarrier = 14;   // + place: all that are told know which

}  // namespace warploom
