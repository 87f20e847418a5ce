"""Where in the key sequence a mask can be true: an interval read off its and/or tree.

A comparison that is linear in kv_pos is a half line (or, for equality, an interval), and one of a
number that a condition on kv_pos chooses is that of either number where it is chosen; `and`
intersects, `or` takes the hull, and whatever cannot be solved is the whole sequence. The result
is a superset: no visible key is outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.dsl.graphs import fold
from warploom.dsl.graphs.box import Box
from warploom.dsl.graphs.extents import Extents
from warploom.dsl.graphs.linear import Linear, linear
from warploom.dsl.types.ir import COMPARISONS, Kind, Node, const, var, walk

_KV_POS = var("kv_pos")
_KV_LEN = var("kv_len")
_LAST = fold.arithmetic("sub", _KV_LEN, const(1))
# least and greatest a - b for which `a op b` holds
_SOLUTIONS: dict[str, tuple[int | None, int | None]] = {
    "lt": (None, -1),
    "le": (None, 0),
    "eq": (0, 0),
    "ge": (0, None),
    "gt": (1, None),
}


@dataclass(frozen=True)
class Region:
    """First and last visible kv_pos; None is the sequence's own end. Empty if first > last.

    Attributes:
        is_normal: inside the sequence, and if empty then (kv_len, -1), which hulls may ignore.
    """

    first: Node | None = None
    last: Node | None = None
    is_normal: bool = False

    def intersect(self, other: Region) -> Region:
        return Region(_join("max", self.first, other.first), _join("min", self.last, other.last))

    def unless(self, unknown: Node) -> Region:
        """This region, or the whole sequence where a condition holds."""
        if unknown is fold.FALSE:
            return self
        first = None if self.first is None else fold.select(unknown, const(0), self.first)
        last = None if self.last is None else fold.select(unknown, _LAST, self.last)
        return Region(first, last, self.is_normal)

    def hull(self, other: Region) -> Region:
        if WHOLE in (self, other):
            return WHOLE
        (a, b), (c, d) = self._normal(), other._normal()
        return Region(fold.arithmetic("min", a, c), fold.arithmetic("max", b, d), True)

    def _normal(self) -> tuple[Node, Node]:
        nothing, zero = const(-1), const(0)
        first, last = self.first, self.last
        if first is not None and last is not None:
            if self.is_normal:
                return first, last
            is_empty = fold.compare("gt", first, last)
            first = fold.arithmetic("max", first, zero)
            last = fold.arithmetic("min", last, _LAST)
            return fold.select(is_empty, _KV_LEN, first), fold.select(is_empty, nothing, last)
        if first is not None:
            is_empty = fold.compare("ge", first, _KV_LEN)
            return fold.arithmetic("max", first, zero), fold.select(is_empty, nothing, _LAST)
        assert last is not None  # or it were WHOLE
        is_empty = fold.compare("lt", last, zero)
        return fold.select(is_empty, _KV_LEN, zero), fold.arithmetic("min", last, _LAST)


WHOLE = Region()


def visible_range(mask: Node, box: Box) -> tuple[Node, Node]:
    """Positions of keys that the mask may show to some row of the box.

    Args:
        mask: BOOL graph of `logits_mask`.
        box: ranges of the query's positions; kv_pos ranges over the whole sequence.

    Returns:
        Graphs of a half-open range inside [0, kv_len), begin <= end.
    """
    region = _Solver(box).region(mask, True)
    begin, end = const(0), _KV_LEN
    if region.first is not None:
        begin = fold.arithmetic("max", region.first, begin)
        begin = fold.arithmetic("min", begin, _KV_LEN)
    if region.last is not None:
        after = (linear(region.last) + Linear({}, 1)).node()
        end = fold.arithmetic("max", fold.arithmetic("min", after, end), begin)
    unknown = box.has_nan()
    return fold.select(unknown, const(0), begin), fold.select(unknown, _KV_LEN, end)


class _Solver:
    def __init__(self, box: Box) -> None:
        self._box = box
        self._extents = Extents(wide=True)

    def region(self, root: Node, wanted: bool) -> Region:
        """Where `root` may be equal to `wanted`."""
        if root.op == "not":
            return self.region(root.args[0], not wanted)
        if root.op in ("and", "or"):
            left, right = (self.region(arg, wanted) for arg in root.args)
            return left.intersect(right) if (root.op == "and") == wanted else left.hull(right)
        if root.op == "select":
            return self._chosen(root, wanted)
        if root.op in COMPARISONS and root.args[0].kind is Kind.INT:
            op = root.op if wanted else fold.OPPOSITE[root.op]
            if op in _SOLUTIONS:
                low, high = (None if v is None else Linear({}, v) for v in _SOLUTIONS[op])
                found = self._solve(linear(root.args[0]) - linear(root.args[1]), low, high)
                if found is not None:
                    return found.unless(fold.either(*map(self._box.wraps, root.args)))
        truth = self._box.truth(root)
        possible = truth.may_hold if wanted else truth.may_fail
        if possible is fold.TRUE:
            return WHOLE
        first = fold.select(possible, const(0), _KV_LEN)  # everything, or nothing
        return Region(first, fold.select(possible, _LAST, const(-1)), True)

    def _chosen(self, root: Node, wanted: bool) -> Region:
        condition, if_true, if_false = root.args
        first = self.region(condition, True).intersect(self.region(if_true, wanted))
        second = self.region(condition, False).intersect(self.region(if_false, wanted))
        return first.hull(second)

    def _solve(self, form: Linear, low: Linear | None, high: Linear | None) -> Region | None:
        """Where low <= form <= high is possible; None if this method does not tell."""
        unknowns = [atom for atom in form.terms if _reads_key(atom)]
        if len(unknowns) != 1:
            return None
        (unknown,) = unknowns
        factor = form.terms[unknown]
        least, greatest = self._box.sum_range(form - Linear({unknown: factor}))
        low = None if low is None or greatest is None else low - greatest
        high = None if high is None or least is None else high - least
        if not all(end is None or self._extents.is_small(end) for end in (low, high)):
            return None
        if factor < 0:
            low, high = (None if v is None else v * -1 for v in (high, low))
        if abs(factor) != 1:
            low = None if low is None else _floor(low * -1, abs(factor)) * -1  # rounded up
            high = None if high is None else _floor(high, abs(factor))
        return self._solve_atom(unknown, low, high)

    def _solve_atom(self, unknown: Node, low: Linear | None, high: Linear | None) -> Region | None:
        if unknown is _KV_POS:
            first, last = (None if end is None else end.node() for end in (low, high))
            return Region(first, last)
        if unknown.op == "select":
            return self._solve_select(unknown, low, high)
        divisor = fold.int_value(unknown.args[1]) if unknown.op == "floordiv" else None
        if divisor is None or divisor <= 0:
            return None
        # low <= x // d <= high  is  low * d <= x <= high * d + d - 1
        low = None if low is None else low * divisor
        high = None if high is None else high * divisor + Linear({}, divisor - 1)
        found = self._solve(linear(unknown.args[0]), low, high)
        return None if found is None else found.unless(self._box.wraps(unknown.args[0]))

    def _solve_select(self, root: Node, low: Linear | None, high: Linear | None) -> Region:
        """Where the number that a condition chooses lies in [low, high]: a sequence in pieces."""
        condition, *values = root.args
        found = []
        for is_true, value in zip((True, False), values, strict=True):
            where = self.region(condition, is_true)
            solved = self._solve(linear(value), low, high)
            if solved is not None:
                where = where.intersect(solved.unless(self._box.wraps(value)))
            found.append(where)
        return found[0].hull(found[1])


def _floor(form: Linear, divisor: int) -> Linear:
    return linear(fold.arithmetic("floordiv", form.node(), const(divisor)))


def _join(op: str, a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a or b
    return fold.arithmetic(op, a, b)


def _reads_key(root: Node) -> bool:
    return any(found is _KV_POS for found in walk(root))
