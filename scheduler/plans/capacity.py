"""From bounds to sizes: the largest length of each section of a plan, and its offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import ClassVar

from warploom.errors import ArgumentError
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.layout import (
    HEADER,
    MERGE,
    OPENING,
    ROLE_HEADER,
    SEGMENT,
    WORK_ITEM,
    Record,
)
from warploom.scheduler.model.roles import Role, check_ctas, most_cuts, num_lists, split_of
from warploom.scheduler.partition.fixed import ChunkCounts


@dataclass(frozen=True)
class Capacity:
    """Lengths of all sections for the largest batch; the layout of the plan buffer follows from
    them.

    Attributes:
        bounds: the batches that fit.
        num_ctas: CTAs of the grid.
        max_items, max_segments, max_merges: numbers of records.
        max_slots: partial results, of `slot_rows` rows each.
        max_indices: entries of the block list.
        num_roles: roles of the plans.
        votes_bytes: bytes for the votes of a device planner.
    """

    bounds: Bounds
    num_ctas: int
    max_items: int
    max_segments: int
    max_merges: int
    max_slots: int
    max_indices: int
    slot_rows: int
    num_roles: int = field(default=1, kw_only=True)
    votes_bytes: ClassVar[int] = 4

    @property
    def header(self) -> Record:
        """The first record of the plans."""
        return HEADER if self.num_roles == 1 else ROLE_HEADER

    @property
    def num_lists(self) -> int:
        """Lists of items; see `num_lists`."""
        return num_lists(self.num_ctas, self.num_roles)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Section name -> length in int32."""
        return {
            "header": len(self.header.fields),
            "cta_indptr": self.num_lists + 1,
            "openings": self.num_lists * OPENING.itemsize // 4,
            "segments": self.max_segments * len(SEGMENT.fields),
            "merges": self.max_merges * len(MERGE.fields),
            "items": self.max_items * len(WORK_ITEM.fields),
            "indices": self.max_indices,
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Section name -> its first int32; a multiple of 4, so that records load as 16 bytes."""
        offsets, end = {}, 0
        for name, size in self.sizes.items():
            offsets[name] = end
            end += -(-size // 4) * 4
        return offsets

    @cached_property
    def total_ints(self) -> int:
        """Length of the plan buffer in int32."""
        return sum(-(-size // 4) * 4 for size in self.sizes.values())


@dataclass(frozen=True)
class WorkspaceSize:
    """Bytes of the parts of a workspace. Each part begins at a multiple of 256 bytes.

    Attributes:
        plan_bytes: the packed plan.
        partial_o_bytes: float32 [max_slots, rows, head_dim_v].
        partial_state_bytes: float32 [max_slots, rows, 2], largest logit and sum.
        arrivals_bytes: uint32 [max_merges], zero between launches.
        votes_bytes: uint32 of a planner on the device, zero between launches.
        stamps_bytes: a record of times for each item, if kernels write them.
    """

    plan_bytes: int
    partial_o_bytes: int
    partial_state_bytes: int
    arrivals_bytes: int
    votes_bytes: int = 4
    stamps_bytes: int = 0

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Part name, as in the fields -> first byte; "total" -> end."""
        offsets, end = {}, 0
        for name in ("plan", "partial_o", "partial_state", "arrivals", "votes", "stamps"):
            offsets[name] = end
            end += -(-getattr(self, f"{name}_bytes") // 256) * 256
        return offsets | {"total": end}

    @property
    def total(self) -> int:
        """Bytes of the whole workspace."""
        return self.offsets["total"]


def max_query_tiles(q_rows: int, segments: int, rows: int, group_size: int) -> int:
    """Most query tiles that `segments` segments with `q_rows` query rows in all can have, exactly.

    A segment of n rows has ceil(n * group_size / rows) tiles. These points (n, tiles) are all
    lattice points below a line, and a sum of k lattice points of a convex polygon can be any
    lattice point of the k-fold polygon. So the maximum is k times the polygon's upper edge at
    q_rows / k, rounded down.
    """
    if q_rows == 0 or segments == 0:
        return 0
    common = gcd(rows, group_size)
    period = rows // common
    # The fewest rows that waste as much of the last tile as possible; from there on the edge is
    # straight.
    worst = pow(group_size // common, -1, period) if period > 1 else 1
    if q_rows >= segments * worst:
        return (group_size * q_rows + segments * (rows - common)) // rows
    points = [(n, -(-n * group_size // rows)) for n in range(worst + 1)]
    best = 0
    for left, low in points:
        for right, high in points[left + 1 :]:
            if left * segments <= q_rows <= right * segments:
                weighted = low * (right * segments - q_rows) + high * (q_rows - left * segments)
                best = max(best, weighted // (right - left))
    return best


def capacity(
    bounds: Bounds,
    *,
    rows: int,
    keys: int,
    num_kv_heads: int,
    group_size: int,
    num_ctas: int,
    split_size: int | None = None,
    chunks: ChunkCounts | None = None,
    smaller: tuple[Role, ...] = (),
) -> Capacity:
    """Section lengths that no batch within the bounds exceeds, under any mask and any SM limit.

    The lengths are attained: items, segments and indices by some batch and mask for every bound;
    merges and slots where a tile can be long enough (and, without `split_size`, for one key/value
    head and up to 64 CTAs; else they may be a few slots above what can occur). Two roles with
    `split_size` attain theirs if all tiles can have the smaller size. See `balance.level` for the
    proof of 2 * num_ctas - 2 slots.

    Args:
        bounds: the largest batch.
        rows, keys: tile sizes; with two roles, of the role with the most rows.
        num_kv_heads, group_size: key/value heads, and query heads of each.
        num_ctas: CTAs of the grid.
        split_size: keys at whose multiples tiles are cut, rounded up to the key tile of their
            role; None: cut to balance the load.
        chunks: counts for `split_size` of a batch at hand, if no other batch must fit.
        smaller: the other role. It adds no query tiles (see `roles`), and slots have room for the
            rows of either role; but there are more lists with work, and more cuts between them
            (`most_cuts`).

    Raises:
        ArgumentError: the bounds need more records than int32 can count, or two roles have more
            CTAs than one counter holds.
    """
    tiles = num_kv_heads * max_query_tiles(bounds.max_q_rows, bounds.segments, rows, group_size)
    if split_size is None:
        shapes = [(rows, keys), *((role.rows, role.keys) for role in smaller)]
        tile_cuts = _cuts_of_a_tile(bounds.max_kv_len, shapes)
        cuts = min(most_cuts(num_ctas, 1 + len(smaller)), tiles * tile_cuts)
        merges = min(tiles, cuts)
        items, slots = tiles + cuts, merges + cuts
    else:
        # A tile has at most as many chunks as if its role had the smaller key tile.
        shortest = min(split_of(split_size, each) for each in (keys, *(r.keys for r in smaller)))
        each = max(1, -(-bounds.max_kv_len // shortest))
        merges = tiles if each > 1 else 0
        most = ChunkCounts(tiles * each, merges, merges * each)
        most = most if chunks is None else most.within(chunks)
        items, merges, slots = most.items, most.merges, most.slots
    sections = items, bounds.segments, merges, slots, bounds.max_blocks
    check_ctas(num_ctas, 1 + len(smaller))
    result = Capacity(bounds, num_ctas, *sections, slot_rows=rows, num_roles=1 + len(smaller))
    if max(result.total_ints, slots * rows) > INT32_MAX:
        reason = f"need {items} work items and {slots} partial slots, beyond what int32 counts"
        raise ArgumentError(name="bounds", reason=reason + "; declare smaller ones")
    return result


def _cuts_of_a_tile(kv_len: int, shapes: Sequence[tuple[int, int]]) -> int:
    """Most cuts of a query tile by the Stream-K partition: no piece is shorter than a grain."""
    grains = ((keys, CostModel.for_stream_k(rows, keys).grain) for rows, keys in shapes)
    return max(0, *(-(-kv_len // keys) // grain - 1 for keys, grain in grains))


def workspace_size(room: Capacity, head_dim_v: int, stamp_bytes: int = 0) -> WorkspaceSize:
    """Bytes of the workspace that holds every plan of a layout.

    Args:
        room: the layout.
        head_dim_v: length of value vectors.
        stamp_bytes: bytes of times that a kernel writes for each item; 0: none.
    """
    partial_rows = room.max_slots * room.slot_rows
    return WorkspaceSize(
        plan_bytes=4 * room.total_ints,
        partial_o_bytes=4 * partial_rows * head_dim_v,
        partial_state_bytes=8 * partial_rows,
        arrivals_bytes=4 * room.max_merges,
        votes_bytes=room.votes_bytes,
        stamps_bytes=stamp_bytes * room.max_items,
    )
