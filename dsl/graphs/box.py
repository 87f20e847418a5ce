"""Interval arithmetic as a transformation of graphs.

Over a box of positions every expression gets graphs for its least and its greatest value, and
every condition gets graphs for whether it may hold and may fail. They are ordinary IR over the
corners of the box, so that lowering turns them into C++ and the NumPy evaluator runs them:
neither knows a rule of intervals.

A range is never too small. Integers are exact, and wrap at 32 bits as in kernels. Floats are
widened after every operation by more than the error of fp32, of the fast functions and of
contraction, so that a bound holds for the fp32 kernel and for the float64 oracle; a NaN among the
bounds makes the whole answer "unknown".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import INT32, Extents, within
from warploom.dsl.graphs.interval_rules import (
    FLOAT_RULES,
    INT_RULES,
    LOGIC_RULES,
    MONOTONE,
    NAN,
    UNKNOWN,
    Range,
    Truth,
    hull,
    monotone,
    outside,
    wrapped,
)
from warploom.dsl.graphs.linear import Linear, linear
from warploom.dsl.types.accuracy import FAST_ERROR
from warploom.dsl.types.ir import BITWISE, COMPARISONS, Kind, Node, const, node
from warploom.dsl.types.number_types import LIMITS

_LITERAL_ERROR = 1e-7  # relative; a float64 literal, scalar or integer as fp32
_OPERATION_ERROR = 1e-6  # relative; about 8 units in the last place of fp32
_FLUSHED = 1.2e-38  # absolute; smaller results may become zero
_EXACT_LITERAL = 2.0**24  # whole numbers below are exact in fp32
_MOST_HEADS = 8  # query heads of a tile that are looked at one by one
_CERTAIN = BITWISE | {"floordiv", "mod", "min", "max", "abs"}


class Box:
    """Ranges of expressions while positions run over a box.

    Args:
        positions: range of each position variable; others are unknown.
        tensors: names of tensors whose values may be read.
    """

    def __init__(self, positions: Mapping[str, Range], tensors: Collection[str]) -> None:
        self._positions = positions
        self._tensors = tensors
        self._ranges: dict[Node, Range] = {}
        self._truths: dict[Node, Truth] = {}
        self._extents = Extents()
        self._float_bounds: dict[Node, None] = {}  # an ordered set
        self._heads: list[Box] = []

    def has_nan(self) -> Node:
        """Whether some rule met so far does not hold for the values at hand."""
        found = fold.FALSE
        for bound in self._float_bounds:
            found = fold.either(found, fold.compare("ne", bound, bound))
        return found

    def range(self, root: Node) -> Range:
        """Range of an INT or FLOAT expression."""
        found = self._ranges.get(root)
        if found is None:
            rule = self._int_range if root.kind is Kind.INT else self._float_range
            found = self._ranges[root] = rule(root)
        return found

    def truth(self, root: Node) -> Truth:
        """What a BOOL expression can be."""
        found = self._truths.get(root)
        if found is None:
            found = self._truths[root] = self._truth(root)
        return found

    def sum_range(self, form: Linear) -> tuple[Linear | None, Linear | None]:
        """Least and greatest value of a sum, as sums of corners."""
        ends: list[Linear | None] = [Linear({}, form.constant)] * 2
        for atom, factor in form.terms.items():
            bounds = self.range(atom)
            corners = (bounds.least, bounds.greatest)
            for i, corner in enumerate(corners if factor > 0 else reversed(corners)):
                before = ends[i]
                if before is not None:
                    ends[i] = None if corner is None else before + linear(corner) * factor
        return ends[0], ends[1]

    # --- integers

    def wraps(self, root: Node) -> Node:
        """Whether 32 bits may not hold an INT expression, as a sum, somewhere in the box."""
        form = linear(root)
        if form.terms == {root: 1} or within(self._extents.of_sum(form)):
            return fold.FALSE  # the range of an atom has wrapped
        return outside(self._sum(form))

    def _sum(self, form: Linear) -> Range:
        if not self._extents.is_small(form):
            return UNKNOWN
        return Range(*(None if end is None else end.node() for end in self.sum_range(form)))

    def _int_range(self, root: Node) -> Range:
        form = linear(root)
        if form.terms == {root: 1}:
            found = self._atom_range(root)
            return wrapped(found) if self._extents.may_wrap(root) else found
        found = self._sum(form)
        return found if within(self._extents.of_sum(form)) else wrapped(found)

    def _atom_range(self, root: Node) -> Range:
        if root.op == "var":
            return self._positions.get(str(root.attr), UNKNOWN)
        if root.op == "scalar":
            return Range(root, root)
        if root.op == "load":
            return self._load(root)
        if root.op == "select":
            return hull(self.truth(root.args[0]), *map(self.range, root.args[1:]))
        if root.op == "to_int":
            return self._to_int(root.args[0])
        if root.op == "cast":
            return self._cast(root)
        operands = [self.range(arg) for arg in root.args]
        points = tuple(r.point for r in operands if r.point is not None)
        if root.op in _CERTAIN and len(points) == len(operands):
            value = node(root.op, Kind.INT, points)
            return Range(value, value)
        rule = INT_RULES.get(root.op)
        return rule(*operands) if rule else UNKNOWN

    def _cast(self, root: Node) -> Range:
        (arg,) = root.args
        limits = LIMITS[root.type]
        held = arg.op in ("load", "scalar") or within(self._extents.of(arg), limits)
        return self.range(arg) if held else wrapped(self.range(arg), limits)

    def _to_int(self, arg: Node) -> Range:
        if arg.kind is Kind.BOOL:
            one, zero = Range(const(1), const(1)), Range(const(0), const(0))
            return hull(self.truth(arg), one, zero)

        def truncate(bound: Node) -> Node:  # never decreases; huge floats are the largest ints
            low = node("max", Kind.FLOAT, (bound, const(-(2.0**31))))
            whole = node("to_int", Kind.INT, (node("min", Kind.FLOAT, (low, const(2.0**31))),))
            return fold.arithmetic("min", whole, const(INT32[1]))

        return self.range(arg).apply(truncate)

    def _load(self, root: Node) -> Range:
        value = self._loaded(root)
        if value is not None:
            return self._checked(Range(value, value))
        heads = self._loaded_by_head(root)
        if not heads:
            return UNKNOWN
        least = greatest = heads[0]
        for head in heads:
            self._checked(Range(head, head))  # min and max may drop a NaN
        for head in heads[1:]:
            least = fold.arithmetic("min", least, head)
            greatest = fold.arithmetic("max", greatest, head)
        low, high = (NAN, NAN) if root.kind is Kind.FLOAT else map(const, INT32)
        few = self._has_few_heads()
        return self._checked(Range(fold.select(few, least, low), fold.select(few, greatest, high)))

    def _loaded(self, root: Node) -> Node | None:
        """A tensor's element, if it is one and the same in the whole box, and known."""
        points = tuple(p for p in (self.range(arg).point for arg in root.args) if p is not None)
        if root.attr not in self._tensors or len(points) < len(root.args):
            return None
        return node("load", root.kind, points, root.attr)

    # --- tensors by query head: a tile holds few heads, so they are looked at one by one

    def _loaded_by_head(self, root: Node) -> list[Node]:
        """The element of each query head (some twice); empty if heads do not decide it."""
        found = [box._loaded(root) for box in self._boxes_of_heads()]
        return [value for value in found if value is not None]

    def _boxes_of_heads(self) -> list[Box]:
        ends = self._positions.get("q_head", UNKNOWN).ends
        if ends is None or ends[0] is ends[1]:
            return []
        if not self._heads:
            for i in range(_MOST_HEADS):
                head = fold.arithmetic("min", fold.arithmetic("add", ends[0], const(i)), ends[1])
                positions = {**self._positions, "q_head": Range(head, head)}
                self._heads.append(Box(positions, self._tensors))
        return self._heads

    def _has_few_heads(self) -> Node:
        first, last = self._positions["q_head"].ends or (const(0), const(0))
        return fold.compare("lt", fold.arithmetic("sub", last, first), const(_MOST_HEADS))

    # --- floats

    def _float_range(self, root: Node) -> Range:
        if root.op in ("const", "scalar"):
            return self._widened(Range(root, root), _LITERAL_ERROR)
        if root.op == "load":
            return self._load(root)
        operands = [self.range(arg) for arg in root.args if arg.kind is not Kind.BOOL]
        if not operands or any(r.ends is None for r in operands):
            return UNKNOWN  # perhaps NaN, which no operation makes better
        if root.op == "select":
            return hull(self.truth(root.args[0]), *operands)
        if root.op == "to_float":
            raised = operands[0].apply(lambda bound: node("to_float", Kind.FLOAT, (bound,)))
            return self._widened(raised, _LITERAL_ERROR)
        if root.op in MONOTONE:
            return self._widened(monotone(root.op, operands[0]), *FAST_ERROR[root.op])
        rule = FLOAT_RULES.get(root.op)
        return self._widened(rule(*operands), _OPERATION_ERROR, _FLUSHED) if rule else UNKNOWN

    def _widened(self, bounds: Range, relative: float, absolute: float = 0.0) -> Range:
        if bounds.ends is None or relative == absolute == 0.0 or _is_exact(bounds.point):
            return self._checked(bounds)

        def outward(op: str, bound: Node) -> Node:
            size = node("abs", Kind.FLOAT, (bound,))
            slack = node("mul", Kind.FLOAT, (size, const(relative)))
            if absolute:
                slack = node("add", Kind.FLOAT, (slack, const(absolute)))
            return node(op, Kind.FLOAT, (bound, slack))

        least, greatest = bounds.ends
        return self._checked(Range(outward("sub", least), outward("add", greatest)))

    def _checked(self, bounds: Range) -> Range:
        for bound in (bounds.least, bounds.greatest):
            if bound is not None and bound.kind is Kind.FLOAT and not _is_exact(bound):
                self._float_bounds[bound] = None
        return bounds

    # --- conditions

    def _truth(self, root: Node) -> Truth:
        if root.op in ("const", "scalar"):
            return Truth(root, fold.invert(root))
        if root.op == "load":
            return self._truth_of_load(root)
        if root.op in COMPARISONS:
            if root.args[0].kind is Kind.INT:
                return self._compare_ints(root.op, *root.args)
            if root.args[0].kind is Kind.FLOAT:
                return self._compare_floats(root.op, *root.args)
        rule = LOGIC_RULES.get(root.op)
        return rule(*map(self.truth, root.args)) if rule else Truth()

    def _truth_of_load(self, root: Node) -> Truth:
        value = self._loaded(root)
        if value is not None:
            return Truth(value, fold.invert(value))
        heads = self._loaded_by_head(root)
        if not heads:
            return Truth()
        holds = fails = fold.invert(self._has_few_heads())
        for head in heads:
            holds, fails = fold.either(holds, head), fold.either(fails, fold.invert(head))
        return Truth(holds, fails)

    def _compare_ints(self, op: str, a: Node, b: Node) -> Truth:
        found = self._compare_to_zero(op, linear(a) - linear(b))
        wraps = fold.either(self.wraps(a), self.wraps(b))
        return Truth(fold.either(found.may_hold, wraps), fold.either(found.may_fail, wraps))

    def _compare_to_zero(self, op: str, form: Linear) -> Truth:
        if op in ("gt", "ge", "ne"):
            opposite = self._compare_to_zero(fold.OPPOSITE[op], form)
            return Truth(opposite.may_fail, opposite.may_hold)
        if not self._extents.is_small(form):
            return Truth()
        least, greatest = self.sum_range(form)
        if op in ("lt", "le"):
            return Truth(
                fold.TRUE if least is None else least.compare(op),
                fold.TRUE if greatest is None else fold.invert(greatest.compare(op)),
            )
        if least is not None and least == greatest:
            return Truth(least.compare("eq"), least.compare("ne"))
        reaches_down = fold.TRUE if least is None else least.compare("le")
        reaches_up = fold.TRUE if greatest is None else greatest.compare("ge")
        is_off = fold.TRUE
        if least is not None and greatest is not None:
            is_off = fold.either(least.compare("ne"), greatest.compare("ne"))
        return Truth(fold.both(reaches_down, reaches_up), is_off)

    def _compare_floats(self, op: str, a: Node, b: Node) -> Truth:
        if op in ("gt", "ge"):
            return self._compare_floats({"gt": "lt", "ge": "le"}[op], b, a)
        left, right = self.range(a).ends, self.range(b).ends
        if op in ("eq", "ne") or left is None or right is None:
            return Truth()
        # Written as "not surely so", that a NaN may decide nothing.
        return Truth(
            fold.invert(fold.compare(fold.OPPOSITE[op], left[0], right[1])),
            fold.invert(fold.compare(op, left[1], right[0])),
        )


def _is_exact(bound: Node | None) -> bool:
    """True for constants that fp32 and float64 hold alike."""
    if bound is None or bound.op != "const":
        return False
    value = float(bound.attr)  # type: ignore[arg-type]
    is_whole = value.is_integer() and abs(value) < _EXACT_LITERAL
    return is_whole or value in (float("inf"), float("-inf"))
