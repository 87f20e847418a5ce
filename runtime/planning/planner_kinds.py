"""Which native planners of a host the batches of a wrapper may need."""

from __future__ import annotations

from collections.abc import Iterable

from warploom.codegen.source import TileConfig
from warploom.runtime.planning.rules import Options
from warploom.scheduler.model.problem import Partition, tiles_share_keys


def may_be_longest_first(tile: TileConfig, options: Options, group_size: int) -> bool:
    """Whether tiles of some batch, within the bounds if any, are assigned longest first."""
    bounds = options.bounds
    if options.batch_invariant or tile.decode is not None:
        return False
    if bounds is None:
        return True
    return tiles_share_keys(bounds.max_q_rows * group_size, tile.rows, 1)  # for a single segment


def planner_kinds(
    tiles: Iterable[TileConfig], options: Options, group_size: int
) -> list[Partition]:
    """Partitions whose native planners batches of a host may need, in a fixed order."""
    tiles = set(tiles)
    kinds = {host_partition(bool(tile.of_roles)) for tile in tiles}
    if any(may_be_longest_first(tile, options, group_size) for tile in tiles):
        kinds.add(Partition.LONGEST_FIRST)
    return [kind for kind in Partition if kind in kinds]


def host_partition(has_roles: bool) -> Partition:
    """The partition of a host's native plans, if tiles of one role are few."""
    return Partition.ROLES_DEALT if has_roles else Partition.LINES
