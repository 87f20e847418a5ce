// Sizes of the plan of one role, and its place in the whole plan.
#pragma once

#include <warploom/planner/batch.hpp>

namespace warploom {

// What is known about a role before there is a batch.
struct RoleShape {
  int rows, keys;                       // of a tile
  int fixed, per_tile, grain, partial;  // costs; see scheduler/model/cost.py
  int max_tiles, max_requests;          // as in Params
  int max_slices, max_marks;            // capacities: slices of a line, and boundaries
  int role;
  int least_rows, most_rows;    // fused rows of a segment that takes the role
  int own_lists, shared_lists;  // first list that a CTA owns; first shared list

  // Query tiles of a segment with `fused` fused rows; 0 if it takes another role.
  WL_FN int tiles_of(int fused) const {
    return fused >= least_rows && fused <= most_rows ? quotient(fused - 1, rows) + 1 : 0;
  }
};

// The cost of a chunk of a query tile: `CostModel.of_chunks`. `Model` has costs as RoleShape has.
template <class Model>
WL_FN wide cost_of_chunk(const Model& model, int visible) {
  return model.fixed + wide(model.per_tile) * visible;
}

// The shape of a plan's only role, which all segments take.
template <class Params>
WL_FN RoleShape shape_of_all(const Params& p) {
  RoleShape z = {};
  z.rows = p.rows, z.keys = p.keys;
  z.fixed = p.fixed, z.per_tile = p.per_tile, z.grain = p.grain, z.partial = p.partial;
  z.max_tiles = p.max_tiles, z.max_requests = p.max_requests;
  z.max_slices = p.slices;
  z.max_marks = kOptions * (p.slices + 1);
  z.least_rows = 1, z.most_rows = 0x7fffffff;
  return z;
}

// Equal lines of items, and the heads and slices of each: `Grid` of
// scheduler/partition/stream_k.py.
struct Grid {
  int lines, heads, slices;
};

// Counts of what CTAs own and of what they claim: slices of a line, or lists of a role.
struct OwnAndShared {
  int own, shared;
};

// Added to the numbers of a role's CTAs, items, slots and merges. Items in shared lists are
// numbered apart from items in CTAs' own lists. All offsets are 0 in a plan of one role.
struct Offsets {
  int cta = 0, item = 0, shared_item = 0, slot = 0, merge = 0;
};

}  // namespace warploom
