"""Decides which shared prefixes become parts: keys are read once, but states must be merged.

The unit of costs is one key of one head that a tile reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.scheduler.composed.prefixes import PrefixForest
from warploom.scheduler.model.layout import Ints

PER_ITEM = 128  # opening a work item, and waiting for its first keys
# Writing and reading a row's partial result, in keys: head_dim float32 numbers twice, where a key
# is 2 * head_dim 16-bit numbers; and the same again, because the row's other part becomes partial.
PER_ROW = 4


@dataclass(frozen=True)
class Choice:
    """The decision about one prefix.

    Attributes:
        keys: keys read with it: its own, and those of the prefixes before it that are no part.
        requests: requests that share it, without those too large for a tile with the smallest.
        kept: it is a part; else its keys are read with the keys that follow.
        tiles: query tiles that read it as a part.
        others: query tiles that read it if it is no part.
        paid: what the part costs, in keys of one head.
    """

    keys: int
    requests: int
    kept: bool
    tiles: int
    others: int
    paid: int

    @property
    def saved(self) -> int:
        """Keys of one head that need not be read again, if it is a part."""
        return (self.others - self.tiles) * self.keys

    def __str__(self) -> str:
        if self.requests < 2:
            return f"{self.keys} keys: read by each request, since those with them fill tiles alone"
        verdict = "a part of its own" if self.kept else "read with what follows"
        return (
            f"{self.keys} keys of {self.requests} requests: {verdict} ({self.tiles} query "
            f"{'tile' if self.tiles == 1 else 'tiles'} in place "
            f"of {self.others} save {self.saved} reads of a key, and merging costs as much as "
            f"{self.paid})"
        )


def choose_parts(
    forest: PrefixForest, units: Ints, fused_rows: Ints, rows: int, levels: int
) -> tuple[npt.NDArray[np.bool_], tuple[Choice, ...]]:
    """Decides for each prefix whether it becomes a part, by modelled cost.

    The keys of a prefix that is no part are read with the nearest parts below it, and by requests
    without such a part. From the leaves up, a prefix is worth a part if these repeated reads of its
    keys cost more than merging; from the roots down, keys of prefixes above that are no part count,
    too.

    Args:
        forest: the prefixes.
        units: (requests,) query tiles that each request has alone.
        fused_rows: (requests,) fused rows of each request.
        rows: rows of a tile.
        levels: most parts that a request reads, its own part included.

    Returns:
        (nodes,) true for parts, and the reason for each node.
    """
    tiles, paid = _as_parts(forest, units, fused_rows, rows)
    keys, parent = forest.length.tolist(), forest.parent.tolist()
    shares = forest.leaf >= 0
    others = np.bincount(forest.leaf[shares], units[shares], len(forest)).astype(np.int64).tolist()
    for node in range(len(forest) - 1, -1, -1):  # parents stand before their children
        if parent[node] >= 0:
            worth = (others[node] - tiles[node]) * keys[node] > paid[node]
            others[parent[node]] += min(tiles[node], others[node]) if worth else others[node]
    kept = np.zeros(len(forest), bool)
    used = [0] * (len(forest) + 1)  # parts from a root to each node; last: above roots
    for node in range(len(forest)):
        above = parent[node]
        if above >= 0 and not kept[above]:
            keys[node] += keys[above]
        worth = (others[node] - tiles[node]) * keys[node] > paid[node]
        kept[node] = worth and used[above] < levels - 1
        used[node] = used[above] + int(kept[node])
    requests = forest.sum_over_requests(np.ones_like(units)).tolist()
    facts = zip(keys, requests, kept.tolist(), tiles, others, paid, strict=True)
    return kept, tuple(Choice(*fact) for fact in facts)


def _as_parts(
    forest: PrefixForest, units: Ints, fused_rows: Ints, rows: int
) -> tuple[list[int], list[int]]:
    """Tiles of each prefix if it is a part, and the cost of making it one."""
    number, filled = forest.sum_over_requests(units), forest.sum_over_requests(fused_rows)
    each = np.maximum(-(-filled // np.maximum(number, 1)), 1)
    tiles = -(-number // np.maximum(rows // each, 1))
    return tiles.tolist(), (tiles * PER_ITEM + filled * PER_ROW).tolist()
