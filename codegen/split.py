"""The dependence split: which part of a functor belongs to a tile, a row, a column or an element.

A sub-expression that reads only lengths, kv_head and scalars is the same for a whole tile; one
that also reads the query is the same along a row, one that also reads kv_pos along a column. Each
largest such part is computed once and kept in a state struct. Only what mixes rows and columns,
or reads the logits, is left to the inner loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from warploom.codegen.lower import reachable
from warploom.dsl.ir import LEAVES, Node


class Level(Enum):
    """What a value depends on; a flag set of (row, column)."""

    TILE = 0
    ROW = 1
    COLUMN = 2
    ELEMENT = 3

    def join(self, other: Level) -> Level:
        return Level(self.value | other.value)


# A tile of fused rows holds several query heads of one kv_head, so q_head belongs to the row.
_VARIABLES: Mapping[str, Level] = {
    "q_pos": Level.ROW,
    "q_head": Level.ROW,
    "q_row": Level.ROW,
    "kv_pos": Level.COLUMN,
}


@dataclass(frozen=True)
class Split:
    """Members of the three states, each in evaluation order."""

    tile: tuple[Node, ...]
    row: tuple[Node, ...]
    column: tuple[Node, ...]

    def members(self, level: Level) -> tuple[Node, ...]:
        return {Level.TILE: self.tile, Level.ROW: self.row, Level.COLUMN: self.column}[level]

    def bound(self, upto: Level) -> dict[Node, str]:
        """C++ text that reads each member inside code of this level."""
        text = {node: f"ts.t{i}" for i, node in enumerate(self.tile)} if upto != Level.TILE else {}
        if upto is Level.ELEMENT:
            text |= {node: f"rs.r{i}" for i, node in enumerate(self.row)}
            text |= {node: f"cs.c{i}" for i, node in enumerate(self.column)}
        return text


def split(roots: Sequence[Node]) -> Split:
    """Find the largest tile, row and column parts of these graphs; leaves are free and stay."""
    levels: dict[Node, Level] = {}
    members: dict[Node, None] = {}  # an ordered set
    for current in reachable(roots):
        levels[current] = _level(current, levels)
        for arg in current.args:
            if levels[arg] is not levels[current] and arg.op not in LEAVES:
                members[arg] = None
    for root in roots:
        if levels[root] is not Level.ELEMENT and root.op not in LEAVES:
            members[root] = None
    return Split(
        *(
            tuple(node for node in levels if node in members and levels[node] is level)
            for level in (Level.TILE, Level.ROW, Level.COLUMN)
        )
    )


def _level(current: Node, levels: Mapping[Node, Level]) -> Level:
    if current.op == "logits":
        return Level.ELEMENT
    if current.op == "var":
        return _VARIABLES.get(str(current.attr), Level.TILE)
    level = Level.TILE
    for arg in current.args:
        level = level.join(levels[arg])
    return level
