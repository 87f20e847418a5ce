"""The one table of plan records: NumPy layouts here, C structs in rendered source.

Every field is an int32. `c_struct` emits the C structs that both back ends compile, so that names
and order of fields, and which lists a plan has, are defined only here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.constants import ENDS, ROUNDS, c_constants

Ints = npt.NDArray[np.int64]  # the planner computes in int64 and stores int32
Records = npt.NDArray[np.void]  # an array of one of the records below


@dataclass(frozen=True)
class Record:
    """One kind of plan record: C name and (field, meaning) in storage order.

    Attributes:
        constants: (name, value, meaning) of what all these records have in common. They take no
            storage.
    """

    name: str
    fields: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int, str], ...] = ()

    @property
    def dtype(self) -> np.dtype[np.void]:
        return np.dtype([(field, np.int32) for field, _ in self.fields])

    def c_struct(self) -> str:
        align = 16 if len(self.fields) % 4 == 0 else 4
        lines = [f"  int {field};  // {meaning}" for field, meaning in self.fields]
        for name, value, meaning in self.constants:
            lines.append(f"  static constexpr int {name} = {value};  // {meaning}")
        return "\n".join([f"struct alignas({align}) {self.name} {{", *lines, "};"])


SEGMENT = Record(
    "Segment",
    (
        ("batch", "request"),
        (
            "q_row",
            "first row of the segment in q and o (within the request's batch entry if dense)",
        ),
        ("q_idx", "that row's index in the request"),
        ("num_q", "query rows of the segment"),
        ("q_len", "query rows of the request"),
        ("kv_len", "keys of the request; kv_pos is below it"),
        ("kv_count", "keys in this segment's list"),
        (
            "kv_block",
            "first index into the blocked dimension, if storage is affine (batch if dense)",
        ),
        (
            "kv_row",
            "first token: within that block if storage is affine, of column 0 if block-sparse",
        ),
        ("index_begin", "first entry of the segment's block list"),
        ("kv_pos", "position of the list's first key (0 but for composed formats)"),
        (
            "index_head_stride",
            "entries between the lists of two key/value heads; 0: they share one",
        ),
    ),
)

WORK_ITEM = Record(
    "WorkItem",
    (
        ("segment", "index of the segment"),
        ("kv_head", "key/value head"),
        (
            "row_begin",
            "first fused row (query row x group + query head in group) within the segment",
        ),
        ("kv_begin", "first key, index into the segment's list; a multiple of the kv tile"),
        ("kv_end", "one past the last key"),
        ("slot", "partial slot that takes the result, or -1: write the output"),
        ("merge", "index of the merge record, or -1"),
        ("rows", "fused rows of the tile in a composed plan, else 0"),
    ),
)

# In a plan of two roles the last field is the role; source of other kernels stays as it is.
ROLE_ITEM = Record(
    "WorkItem", (*WORK_ITEM.fields[:-1], ("role", "whose tile the rows and keys are cut into"))
)

MERGE = Record(
    "Merge",
    (
        ("first_slot", "first partial slot of the tile; slots of one tile are consecutive"),
        ("num_slots", "how many, in ascending order of keys"),
    ),
)

HEADER = Record(
    "PlanHeader",
    (
        ("num_items", "work items in all"),
        ("num_segments", "segments"),
        ("num_merges", "tiles that were split; row merges in a composed plan"),
        ("num_slots", "partial slots in use"),
        ("status", "0, or why a device refused to plan the batch; there are no items then"),
    ),
)

# A plan of two roles has groups of num_ctas lists; this is the role of each group. First come the
# CTAs' own prefills and own decodes, then shared prefills, which any CTA claims (rounds, then ends;
# or whole prefills; or pieces), then shared decodes, which only decoding CTAs claim.
ROLE_OF_LISTS = (0, 1, *(0,) * (ROUNDS - 1 + ENDS), *(1,) * ENDS)
ROLE_LISTS = len(ROLE_OF_LISTS)
SHARED_PREFILLS, SHARED_DECODES = 2, ROLE_LISTS - ENDS  # first group of each

# Plans of two roles have shared lists that CTAs claim (decision 0043).
ROLE_HEADER = Record(
    "PlanHeader",
    (
        *HEADER.fields,
        ("num_shared_prefills", "shared lists of prefills, which any CTA claims when it is done"),
        ("num_active", "CTAs that may have work; those from there on claim nothing"),
        ("num_decode_ctas", "CTAs that decode: the first ones"),
        ("num_shared_decodes", "shared lists of decodes, which those claim before prefills"),
        ("claimed", "counts claims of shared prefills; 0 between launches"),
        ("claimed_decodes", "counts claims of shared decodes; 0 between launches"),
        ("drawn", "counts CTAs that drew their number; 0 between launches"),
    ),
    (
        ("kDecodeLists", ROLE_OF_LISTS.index(1), "where own decodes begin, in CTAs of the grid"),
        ("kSharedPrefills", SHARED_PREFILLS, "the same of shared prefills"),
        ("kSharedDecodes", SHARED_DECODES, "the same of shared decodes"),
        ("kRoleLists", ROLE_LISTS, "where all lists end"),
    ),
)

# In composed plans a work item's `row_begin` is the tile's first entry in `packed_rows`, and its
# `slot` is the first partial row. In place of merges they have row merges, which run when all items
# are done.
UNIT = Record(
    "Unit",
    (
        ("batch", "request"),
        ("q_row", "first query row, in q and o"),
        ("q_pos", "its position"),
        ("q_len", "query rows of the request"),
        ("kv_len", "keys of the request"),
        ("first_head", "first query head, within the group"),
        ("num_heads", "query heads of each query row"),
        ("reserved", "0"),
    ),
)
ROW_MERGE = Record(
    "RowMerge",
    (
        ("first", "first entry of `contributions`: partial rows of the unit's first row"),
        ("count", "how many, in ascending order of keys"),
        ("row", "unit * ROW_CODE + row within the unit"),
        ("kv_head", "key/value head"),
    ),
)
# An entry of `packed_rows` is unit * ROW_CODE + row within the unit, so no tile may have more rows
# than this; composed plans and the kernels (C++: kRowCode) respect it.
ROW_CODE = 512

# What a CTA reads first of a list: the first item and its segment, side by side, so that the load
# of one need not wait for that of the other (decision 0028). C++: opening.hpp.
OPENING = np.dtype([("item", WORK_ITEM.dtype), ("segment", SEGMENT.dtype)])


def c_structs(composed: bool = False, roles: bool = False) -> str:
    """C source of all plan structs, for the code generator's context (passed in by the runtime).

    Args:
        composed: the structs of composed plans, which have units and row merges.
        roles: the structs of plans of two roles. Their header counts shared lists, and their items
            have a role; items of composed plans have rows, from which the role follows.
    """
    header = ROLE_HEADER if roles else HEADER
    item = ROLE_ITEM if roles and not composed else WORK_ITEM
    records = (header, SEGMENT, item, MERGE, *((UNIT, ROW_MERGE) if composed else ()))
    return "\n\n".join(record.c_struct() for record in records)


def c_planning(roles: bool = False) -> str:
    """C source of all that compiled planners share with NumPy's: constants, and plan structs.

    Args:
        roles: the structs of plans of two roles.
    """
    return f"{c_constants()}\n\n{c_structs(roles=roles)}"
