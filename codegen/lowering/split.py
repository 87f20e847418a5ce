"""The dependence split: which part of a functor belongs to a tile, a row, a column or an element.

A sub-expression that reads only lengths, kv_head and scalars is the same for a whole tile; one
that also reads the query is the same along a row, one that also reads kv_pos along a column. Each
largest such part is computed once and kept in a state struct. Only what mixes rows and columns,
or reads the logits, is left to the inner loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from warploom.codegen.lowering.lower import reachable
from warploom.dsl.types.ir import (
    COMPARISONS,
    FLOAT_TESTS,
    LEAVES,
    REDUCTIONS,
    Kind,
    Node,
    const,
    node,
)


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


# Operations whose result jumps where an argument changes a little; a custom function may.
STEPS = COMPARISONS | {"floor", "ceil", "to_int", "floordiv", "mod", "fmod", "call"}
STEPS |= FLOAT_TESTS


_OF_VECTORS = REDUCTIONS | {"element", "logits"}


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
        text: dict[Node, str] = {}
        if upto is not Level.TILE:
            text |= _names("ts.t", self.tile)
        if upto is Level.ELEMENT:
            text |= _names("rs.r", self.row) | _names("cs.c", self.column)
        return text


def _names(prefix: str, members: Sequence[Node]) -> dict[Node, str]:
    names = {member: f"{prefix}{i}" for i, member in enumerate(members)}
    return {
        member: f"({name} != 0)" if member.kind is Kind.BOOL else name
        for member, name in names.items()
    }


def split(roots: Sequence[Node]) -> Split:
    """Find the largest tile, row and column parts of these graphs; leaves are free and stay."""
    known = levels(roots)
    members: dict[Node, None] = {}  # an ordered set
    for current in known:
        for arg in current.args:
            if known[arg] is not known[current] and arg.op not in LEAVES:
                members[arg] = None
    for root in roots:
        if known[root] is not Level.ELEMENT and root.op not in LEAVES:
            members[root] = None
    return Split(
        *(
            tuple(found for found in known if found in members and known[found] is level)
            for level in (Level.TILE, Level.ROW, Level.COLUMN)
        )
    )


# Registers of a thread that copies bound what it may keep for each of its lanes.
_LANE_STATE = 2


def lane_parts(root: Node) -> tuple[Node, ...]:
    """The largest float parts of a vector hook that read the lane, but no position and no vector.

    A rotary frequency is one: it is the same for all rows of a tile.
    """
    return _largest_without([root], ("lse", *_VARIABLES))[:_LANE_STATE]


def tile_parts(lanes: Sequence[Node]) -> tuple[Node, ...]:
    """The largest float parts of those that do not read the lane either: the same for all lanes."""
    return _largest_without(lanes, ("lane", "head_dim", "lse", *_VARIABLES))


def _largest_without(roots: Sequence[Node], moving: Sequence[str]) -> tuple[Node, ...]:
    """Largest float parts that read none of these variables and no vector.

    Reductions are left alone; their lane is another one. Whole numbers and conditions are index
    arithmetic, which compilers fold.
    """
    fixed: dict[Node, bool] = {}
    for current in reachable(roots):
        moves = current.op in _OF_VECTORS or (current.op == "var" and current.attr in moving)
        fixed[current] = not moves and all(fixed[arg] for arg in current.args)
    found: dict[Node, None] = {}  # an ordered set
    waiting = list(roots)
    while waiting:
        current = waiting.pop()
        if fixed[current] and current.kind is Kind.FLOAT and current.op not in LEAVES:
            found[current] = None
        elif current.op not in REDUCTIONS:
            waiting.extend(current.args)
    return tuple(found)


def with_reciprocals(transform: Node, mask: Sequence[Node] = ()) -> Node:
    """Turn x / y into x * (1 / y) where y is known earlier than x, so that a product is left.

    A division costs a GPU ten instructions, and an element has few to spare (see soft-cap). The
    product may round differently, which a step would turn into another result altogether: what a
    step or the mask reads is left as it is.
    """
    known = levels([transform])
    made: dict[Node, Node] = {}
    exact = set(reachable([*_read_by_steps(known), *mask]))
    for current in known:
        args = tuple(made[arg] for arg in current.args)
        if current in exact:
            made[current] = current
        elif current.op == "div" and known[current.args[1]] is not known[current]:
            product = (args[0], inverse(args[1]))
            made[current] = node("mul", Kind.FLOAT, product, source=current.source)
        else:
            made[current] = node(current.op, current.kind, args, current.attr, current.source)
    return made[transform]


def _read_by_steps(parts: Iterable[Node]) -> list[Node]:
    return [arg for current in parts if current.op in STEPS for arg in current.args]


def with_float_distances(transform: Node) -> Node:
    """Turn float(kv_pos - q_pos) into float(kv_pos) - float(q_pos), which a column and a row keep.

    Else each element pays for a subtraction and a conversion of its own. Positions below 2^24 are
    exact as floats, and so is the difference; beyond, it is off by as much as a float of their size
    must be, which a step would turn into another result: what one reads is left as it is.
    """
    parts = list(reachable([transform]))
    exact = set(reachable(_read_by_steps(parts)))
    made: dict[Node, Node] = {}
    for current in parts:
        args = tuple(made[arg] for arg in current.args)
        if current in exact:
            made[current] = current
        elif current.op == "to_float" and _is_distance(args[0]):
            floats = (
                node("to_float", Kind.FLOAT, (position,), source=current.source)
                for position in args[0].args
            )
            made[current] = node("sub", Kind.FLOAT, tuple(floats), source=current.source)
        else:
            made[current] = node(current.op, current.kind, args, current.attr, current.source)
    return made[transform]


def _is_distance(current: Node) -> bool:
    positions = {arg.attr for arg in current.args if arg.op == "var"}
    return current.op == "sub" and positions == {"q_pos", "kv_pos"}


def inverse(divisor: Node) -> Node:
    """1 / divisor, worked out now where that is a constant."""
    value = divisor.attr if divisor.op == "const" else 0.0
    if isinstance(value, float) and value:
        return const(1.0 / value)
    return node("div", Kind.FLOAT, (const(1.0), divisor), source=divisor.source)


def levels(roots: Sequence[Node]) -> dict[Node, Level]:
    """What each node of some graphs depends on; operands come first."""
    found: dict[Node, Level] = {}
    for current in reachable(roots):
        found[current] = _level(current, found)
    return found


def _level(current: Node, known: Mapping[Node, Level]) -> Level:
    if current.op == "logits":
        return Level.ELEMENT
    if current.op == "var":
        return _VARIABLES.get(str(current.attr), Level.TILE)
    level = Level.TILE
    for arg in current.args:
        level = level.join(known[arg])
    return level
