// What the plan of a role is cut into, and where it lies in the whole plan.
#pragma once

namespace warploom {

constexpr int kOptions = 4;  // for the boundaries of a line

// Of one of two roles. The parameters of a planner of one role have what comes first by the same
// names, and lie where the plan begins.
struct RoleShape {
  int rows, keys;                          // of a tile
  int fixed, per_tile, grain, partial;     // costs; see scheduler/cost.py
  int few, snap, max_tiles, max_requests;  // as in the parameters
  int lines, heads_per_line, columns;      // room for so many columns, before there are some
  int marks;                               // and for boundaries
  int role;
  int fewest, most;            // fused rows of the segments that take it
  int list, own, shared_list;  // list of the first CTA; columns from `own` on have others
  int item, shared_item;       // what is added to their items
  int slot, merge;             // and to numbers of slots and merges
};

// Room for boundaries. Parts that are shared have no options.
template <class Shape>
WL_FN int room_for_marks(const Shape& z) {
  return kOptions * (z.columns + 1);
}
WL_FN int room_for_marks(const RoleShape& z) { return z.marks; }

// Query tiles of a segment with so many fused rows.
template <class Shape>
WL_FN int tiles_of(const Shape& z, int fused) {
  return fused > 0 ? quotient(fused - 1, z.rows) + 1 : 0;
}
WL_FN int tiles_of(const RoleShape& z, int fused) {
  return fused >= z.fewest && fused <= z.most ? quotient(fused - 1, z.rows) + 1 : 0;
}

// The list of a CTA of the role.
template <class Shape>
WL_FN int list_index(const Shape&, int cta) {
  return cta;
}
WL_FN int list_index(const RoleShape& z, int cta) {
  const int own = z.own * z.lines;
  return cta < own ? z.list + cta : z.shared_list + cta - own;
}

// What is added to items of a column, and to numbers of slots and merges.
template <class Shape>
WL_FN int item_base(const Shape&, int) {
  return 0;
}
WL_FN int item_base(const RoleShape& z, int column) {
  return column < z.own ? z.item : z.shared_item;
}
template <class Shape>
WL_FN int slot_base(const Shape&) {
  return 0;
}
WL_FN int slot_base(const RoleShape& z) { return z.slot; }
template <class Shape>
WL_FN int merge_base(const Shape&) {
  return 0;
}
WL_FN int merge_base(const RoleShape& z) { return z.merge; }

template <class Shape, class WorkItem>
WL_FN void set_role(const Shape&, WorkItem& work) {
  work.rows = 0;
}
template <class WorkItem>
WL_FN void set_role(const RoleShape& z, WorkItem& work) {
  work.role = z.role;
}

}  // namespace warploom
