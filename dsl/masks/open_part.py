"""A mask in two parts: conditions that intervals can decide for a tile, and those left open.

`causal & kept[kv_pos]` is full in no tile, for no interval knows what the tensor holds. But in
most tiles the causal part is, and there only the tensor's part is left to be tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce

from warploom.dsl.graphs import fold
from warploom.dsl.masks.intervals import tile_box
from warploom.dsl.types.ir import Node


@dataclass(frozen=True)
class MaskParts:
    """A mask that is `decided & open`.

    Attributes:
        decided: conditions that hold everywhere in some tiles.
        open: conditions of which no tile is known to be free.
        decided_may_hide: graph over the corners of a box, as in `TileGraphs`: some element may be
            invisible by what is decided.
    """

    decided: Node
    open: Node
    decided_may_hide: Node


def decided_and_open(mask: Node, tensors: frozenset[str]) -> tuple[list[Node], list[Node]]:
    """The conditions of a mask: those that hold everywhere in some tiles, and the others.

    Args:
        mask: BOOL graph of `logits_mask`.
        tensors: as for `tile_graphs`.
    """
    box = tile_box(tensors)
    decided: list[Node] = []
    left_open: list[Node] = []
    for condition in fold.conjuncts(mask):
        is_open = box.truth(condition).may_fail is fold.TRUE
        (left_open if is_open else decided).append(condition)
    return decided, left_open


@lru_cache(maxsize=256)
def mask_parts(mask: Node, tensors: frozenset[str]) -> MaskParts | None:
    """Part a mask; None if it is all decided or all open.

    Args:
        mask: BOOL graph of `logits_mask`.
        tensors: as for `tile_graphs`.
    """
    decided, left_open = decided_and_open(mask, tensors)
    if not decided or not left_open:
        return None
    box = tile_box(tensors)
    hides = (box.truth(condition).may_fail for condition in decided)
    return MaskParts(
        reduce(fold.both, decided),
        reduce(fold.both, left_open),
        reduce(fold.either, (*hides, box.has_nan())),
    )
