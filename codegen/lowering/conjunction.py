"""The form of a mask that leaves an element few tests: conditions that hold together, reordered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import reduce

from warploom.codegen.lowering.split import Level, levels
from warploom.dsl.graphs import fold
from warploom.dsl.types.ir import Kind, Node, node

_TIGHTER = {"lt": "min", "le": "min", "gt": "max", "ge": "max"}


def few_tests(mask: Node) -> Node:
    """An equal mask that tests less for each element.

    Bounds of one number join, so that `k <= a & k <= b` becomes `k <= min(a, b)`, and a row finds
    the tighter one once. Then what is known of a column is one truth, and so is what is known of a
    row or a tile, in whatever order the conditions were written.
    """
    conditions = _with_joined_bounds(mask)
    known = levels(conditions)
    groups = ([found for found in conditions if known[found] is level] for level in Level)
    return reduce(fold.both, (reduce(fold.both, group) for group in groups if group))


def _with_joined_bounds(mask: Node) -> list[Node]:
    known = levels([mask])
    joined: dict[Hashable, Node] = {}
    for condition in fold.conjuncts(mask):
        bound = _as_bound(condition, known)
        key = condition if bound is None else (bound.op, bound.args[0])
        before = joined.get(key)
        if before is None or bound is None:
            joined[key] = bound or condition
        else:
            limits = (before.args[1], bound.args[1])
            limit = node(_TIGHTER[bound.op], Kind.INT, limits, source=condition.source)
            joined[key] = node(bound.op, Kind.BOOL, (bound.args[0], limit), source=condition.source)
    return list(joined.values())


def _as_bound(condition: Node, known: Mapping[Node, Level]) -> Node | None:
    """An order of whole numbers, one of a column and one of a row or tile, the column's first."""
    if condition.op not in fold.TURNED or condition.args[0].kind is not Kind.INT:
        return None
    if known[condition.args[0]] is not Level.COLUMN:
        turned = fold.TURNED[condition.op]
        condition = node(turned, Kind.BOOL, condition.args[::-1], source=condition.source)
    column, limit = condition.args
    is_bound = known[column] is Level.COLUMN and known[limit] in (Level.ROW, Level.TILE)
    return condition if is_bound else None
