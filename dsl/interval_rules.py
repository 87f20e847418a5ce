"""Interval arithmetic as a transformation of graphs: the one table of its rules.

Over a box of positions every expression gets graphs for its least and its greatest value, and every
condition gets graphs for whether it may be true and whether it may be false somewhere in the box.
The graphs are ordinary IR over the corners of the box, so that lowering turns them into C++ and the
NumPy evaluator runs them: neither knows a rule of intervals.

A range is never too small. Integers are exact. Floats are widened after every operation by more
than the error of fp32, of the fast functions and of contraction, so that a bound also holds for the
fp32 kernel and for the float64 oracle; a NaN anywhere makes the whole answer "unknown".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from warploom.dsl import fold
from warploom.dsl.ir import COMPARISONS, Kind, Node, const, node
from warploom.dsl.linear import Linear, linear

_ULPS = 1e-6  # relative slack of an fp32 operation, in the last place about 8
_TINY = 1.2e-38  # absolute slack: results below it may be flushed to zero
# Functions that never decrease: relative and absolute error of the fast versions.
_MONOTONE: Mapping[str, tuple[float, float]] = {
    "exp": (1e-4, _TINY),
    "exp2": (1e-4, _TINY),
    "tanh": (1e-5, 1e-5),
    "sigmoid": (1e-5, 1e-5),
    "erf": (1e-5, 1e-5),
    "floor": (0.0, 0.0),
    "ceil": (0.0, 0.0),
    "sqrt": (1e-5, _TINY),
    "log": (1e-5, 1e-5),
    "log2": (1e-5, 1e-5),
}
_POSITIVE_ONLY = frozenset({"sqrt", "log", "log2"})
_SMALLEST = const(1e-30)


@dataclass(frozen=True)
class Range:
    """Least and greatest value; None where there is no bound. A float without bounds may be NaN."""

    least: Node | None = None
    greatest: Node | None = None

    @property
    def point(self) -> Node | None:
        """The one value of the whole box, if there is only one."""
        return self.least if self.least is self.greatest else None


@dataclass(frozen=True)
class Truth:
    """What a condition can be somewhere in the box."""

    may_hold: Node = fold.TRUE
    may_fail: Node = fold.TRUE

    @property
    def point(self) -> Node | None:
        return self.may_hold if self.may_fail is fold.invert(self.may_hold) else None


UNKNOWN = Range()
_CERTAIN_OPS = frozenset("pow floordiv mod shl shr bitand bitor bitxor min max abs".split())


class Box:
    """Ranges of expressions while positions run over a box.

    Args:
        positions: range of each position variable; others are unknown.
        tensors: tensors whose values may be read.
    """

    def __init__(self, positions: Mapping[str, Range], tensors: Collection[str]) -> None:
        self._positions = positions
        self._tensors = tensors
        self._ranges: dict[Node, Range] = {}
        self._truths: dict[Node, Truth] = {}
        self._floats: dict[Node, None] = {}  # bounds that are NaN where the rules do not hold

    @property
    def has_nan(self) -> Node:
        """Whether some rule did not apply to the values at hand."""
        found = fold.FALSE
        for bound in self._floats:
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
        least: Linear | None = Linear({}, form.constant)
        greatest: Linear | None = least
        for atom, factor in form.terms.items():
            bounds = self.range(atom)
            low, high = bounds.least, bounds.greatest
            if factor < 0:
                low, high = high, low
            least = None if least is None or low is None else least + linear(low) * factor
            greatest = (
                None if greatest is None or high is None else greatest + linear(high) * factor
            )
        return least, greatest

    # --- integers

    def _int_range(self, root: Node) -> Range:
        form = linear(root)
        if form.terms != {root: 1}:
            least, greatest = self.sum_range(form)
            return Range(least and least.node(), greatest and greatest.node())
        if root.op == "var":
            return self._positions.get(str(root.attr), UNKNOWN)
        if root.op == "scalar":
            return Range(root, root)
        if root.op == "select":
            return self._select(root)
        if root.op == "to_int":
            return self._to_int(root.args[0])
        if root.op == "load":
            return self._load(root)
        points = [self.range(arg).point for arg in root.args]
        if root.op in _CERTAIN_OPS and None not in points:
            value = node(root.op, Kind.INT, tuple(p for p in points if p is not None))
            return Range(value, value)
        rule = _INT_RULES.get(root.op)
        return rule(*(self.range(arg) for arg in root.args)) if rule else UNKNOWN

    def _to_int(self, arg: Node) -> Range:
        if arg.kind is Kind.BOOL:
            truth = self.truth(arg)
            return Range(
                fold.select(truth.may_fail, const(0), const(1)),
                fold.select(truth.may_hold, const(1), const(0)),
            )
        # Truncation is monotone; the int it gives saturates nowhere a functor can rely on.
        return _each(self.range(arg), lambda bound: node("to_int", Kind.INT, (bound,)))

    def _load(self, root: Node) -> Range:
        points = [self.range(arg).point for arg in root.args]
        if root.attr not in self._tensors or None in points:
            return UNKNOWN
        value = node("load", root.kind, tuple(p for p in points if p is not None), root.attr)
        return self._checked(Range(value, value))

    def _select(self, root: Node) -> Range:
        condition = self.truth(root.args[0])
        a, b = map(self.range, root.args[1:])

        def hull(op: str, x: Node | None, y: Node | None) -> Node | None:
            if x is None or y is None:
                return None
            undecided = fold.select(condition.may_hold, fold.arithmetic(op, x, y), y)
            return fold.select(condition.may_fail, undecided, x)

        return Range(hull("min", a.least, b.least), hull("max", a.greatest, b.greatest))

    # --- floats

    def _float_range(self, root: Node) -> Range:
        if root.op == "const":
            return self._widened(Range(root, root), 1e-7)
        if root.op == "scalar":
            return self._widened(Range(root, root), 1e-7)
        if root.op == "var":
            return UNKNOWN
        if root.op == "load":
            return self._load(root)
        conditions = root.args[:1] if root.op == "select" else ()
        numbers = [self.range(arg) for arg in root.args if arg.kind is not Kind.BOOL]
        if any(r.least is None or r.greatest is None for r in numbers):
            return UNKNOWN  # perhaps NaN, which no operation makes better
        if conditions:
            return self._select(root)
        if root.op == "to_float":
            return self._to_float(root.args[0])
        if root.op in _MONOTONE:
            return self._monotone(root)
        rule = _FLOAT_RULES.get(root.op)
        return self._widened(rule(*numbers), _ULPS, _TINY) if rule else UNKNOWN

    def _to_float(self, arg: Node) -> Range:
        if arg.kind is Kind.BOOL:
            return UNKNOWN
        raised = _each(self.range(arg), lambda bound: node("to_float", Kind.FLOAT, (bound,)))
        return self._widened(raised, 1e-7)

    def _monotone(self, root: Node) -> Range:
        argument = self.range(root.args[0])

        def apply(bound: Node) -> Node:
            value = node(root.op, Kind.FLOAT, (bound,), ("precise",))
            if root.op not in _POSITIVE_ONLY:
                return value
            is_inside = fold.compare("ge", argument.least or bound, _SMALLEST)
            return fold.select(is_inside, value, const(float("nan")))

        return self._widened(_each(argument, apply), *_MONOTONE[root.op])

    def _widened(self, bounds: Range, relative: float, absolute: float = 0.0) -> Range:
        def outward(op: str, bound: Node | None) -> Node | None:
            if bound is None or (relative == 0 and absolute == 0):
                return bound
            if bound.op == "const" and float(bound.attr or 0).is_integer() and not absolute:
                return bound  # whole constants are exact in fp32 (beyond 2^24 too, to the slack)
            size = node("abs", Kind.FLOAT, (bound,))
            slack = node("mul", Kind.FLOAT, (size, const(relative)))
            if absolute:
                slack = node("add", Kind.FLOAT, (slack, const(absolute)))
            return node(op, Kind.FLOAT, (bound, slack))

        return self._checked(Range(outward("sub", bounds.least), outward("add", bounds.greatest)))

    def _checked(self, bounds: Range) -> Range:
        for bound in (bounds.least, bounds.greatest):
            if bound is not None and bound.kind is Kind.FLOAT and bound.op != "const":
                self._floats[bound] = None
        return bounds

    # --- conditions

    def _truth(self, root: Node) -> Truth:
        op = root.op
        if op == "const":
            return Truth(root, fold.invert(root))
        if op == "scalar":
            return Truth(root, fold.invert(root))
        if op == "load":
            point = self._load(root).point
            return Truth() if point is None else Truth(point, fold.invert(point))
        if op == "not":
            inner = self.truth(root.args[0])
            return Truth(inner.may_fail, inner.may_hold)
        if op in COMPARISONS:
            by_kind = self._compare_ints if root.args[0].kind is Kind.INT else self._compare_floats
            return by_kind(op, *root.args)
        if op in ("and", "or", "xor", "select"):
            return _LOGIC[op](*map(self.truth, root.args))
        return Truth()

    def _compare_ints(self, op: str, a: Node, b: Node) -> Truth:
        least, greatest = self.sum_range(linear(a) - linear(b))
        if op in ("gt", "ge"):
            opposite = self._compare_ints(fold.OPPOSITE[op], a, b)
            return Truth(opposite.may_fail, opposite.may_hold)
        if op == "ne":
            equal = self._compare_ints("eq", a, b)
            return Truth(equal.may_fail, equal.may_hold)
        if op in ("lt", "le"):
            return Truth(
                fold.TRUE if least is None else least.compare(op),
                fold.TRUE if greatest is None else fold.invert(greatest.compare(op)),
            )
        above = fold.FALSE if least is None else least.compare("gt")
        below = fold.FALSE if greatest is None else greatest.compare("lt")
        may_hold = fold.invert(fold.either(above, below))
        if least is None or greatest is None:
            return Truth(may_hold, fold.TRUE)
        if least == greatest:
            return Truth(least.compare("eq"), least.compare("ne"))
        return Truth(may_hold, fold.either(least.compare("ne"), greatest.compare("ne")))

    def _compare_floats(self, op: str, a: Node, b: Node) -> Truth:
        if a.kind is not Kind.FLOAT or op in ("eq", "ne"):
            return Truth()
        if op in ("gt", "ge"):
            return self._compare_floats({"gt": "lt", "ge": "le"}[op], b, a)
        left, right = self.range(a), self.range(b)
        if None in (left.least, left.greatest, right.least, right.greatest):
            return Truth()
        assert left.least and left.greatest and right.least and right.greatest
        # Written as "not surely false", so that a NaN decides nothing.
        opposite = fold.OPPOSITE[op]
        return Truth(
            fold.invert(fold.compare(opposite, left.least, right.greatest)),
            fold.invert(fold.compare(op, left.greatest, right.least)),
        )


def _each(bounds: Range, function: Callable[[Node], Node]) -> Range:
    """Apply a function that never decreases."""
    low = bounds.least and function(bounds.least)
    return Range(low, low if bounds.point else bounds.greatest and function(bounds.greatest))


def _corners(op: str, a: Range, b: Range) -> Range:
    """Least and greatest of an operation that is monotone in each operand on the box."""
    if None in (a.least, a.greatest, b.least, b.greatest):
        return UNKNOWN
    assert a.least and a.greatest and b.least and b.greatest
    rights = (b.least,) if b.point else (b.least, b.greatest)
    lefts = (a.least,) if a.point else (a.least, a.greatest)
    values = [_plain(op, left, right) for left in lefts for right in rights]
    least = greatest = values[0]
    for value in values[1:]:
        least = fold.arithmetic("min", least, value)
        greatest = fold.arithmetic("max", greatest, value)
    return Range(least, greatest)


def _plain(op: str, a: Node, b: Node) -> Node:
    known = op in ("add", "sub", "mul", "floordiv")
    return fold.arithmetic(op, a, b) if known else node(op, a.kind, (a, b))


def _min_or_max(op: str, a: Range, b: Range) -> Range:
    def bound(x: Node | None, y: Node | None, absent_wins: bool) -> Node | None:
        if x is None or y is None:
            return None if absent_wins else (x or y)
        return fold.arithmetic(op, x, y)

    return Range(bound(a.least, b.least, op == "min"), bound(a.greatest, b.greatest, op == "max"))


def _floordiv(a: Range, b: Range) -> Range:
    return _corners("floordiv", a, b) if b.point else UNKNOWN


def _shift(op: str) -> Callable[[Range, Range], Range]:
    return lambda a, b: _corners(op, a, b) if b.point else UNKNOWN


def _mod(a: Range, b: Range) -> Range:
    """Within one period of the modulus the remainder rises; elsewhere only its sign is known."""
    if not b.point:
        return UNKNOWN
    period, zero = b.point, const(0)
    one = const(1)
    any_low = fold.arithmetic("min", fold.arithmetic("add", period, one), zero)
    any_high = fold.arithmetic("max", fold.arithmetic("sub", period, one), zero)
    if a.least is None or a.greatest is None:
        return Range(any_low, any_high)
    first, last = (fold.arithmetic("floordiv", x, period) for x in (a.least, a.greatest))
    is_inside = fold.compare("eq", first, last)
    return Range(
        fold.select(is_inside, fold.arithmetic("mod", a.least, period), any_low),
        fold.select(is_inside, fold.arithmetic("mod", a.greatest, period), any_high),
    )


def _abs(a: Range) -> Range:
    if a.least is None or a.greatest is None:
        return Range(const(0) if a.least is None or a.least.kind is Kind.INT else None, None)
    zero = const(0) if a.least.kind is Kind.INT else const(0.0)
    below = fold.negate(a.greatest)
    least = fold.arithmetic("max", fold.arithmetic("max", a.least, below), zero)
    return Range(least, fold.arithmetic("max", a.greatest, fold.negate(a.least)))


def _bitand(a: Range, b: Range) -> Range:
    """A constant mask that is not negative bounds the result."""
    masks = [v for v in (r.point and fold.int_value(r.point) for r in (a, b)) if v is not None]
    limits = [mask for mask in masks if mask >= 0]
    return Range(const(0), const(min(limits))) if limits else UNKNOWN


def _divide(a: Range, b: Range) -> Range:
    """Monotone where the divisor keeps its sign; NaN, that is unknown, elsewhere."""
    assert b.least and b.greatest
    zero, nan = const(0.0), const(float("nan"))
    keeps_sign = fold.either(
        fold.compare("gt", b.least, zero), fold.compare("lt", b.greatest, zero)
    )
    found = _corners("div", a, b)
    assert found.least and found.greatest
    return Range(
        fold.select(keeps_sign, found.least, nan), fold.select(keeps_sign, found.greatest, nan)
    )


def _subtract(a: Range, b: Range) -> Range:
    assert a.least and a.greatest and b.least and b.greatest
    return Range(
        fold.arithmetic("sub", a.least, b.greatest), fold.arithmetic("sub", a.greatest, b.least)
    )


def _add(a: Range, b: Range) -> Range:
    assert a.least and a.greatest and b.least and b.greatest
    return Range(
        fold.arithmetic("add", a.least, b.least), fold.arithmetic("add", a.greatest, b.greatest)
    )


_INT_RULES: Mapping[str, Callable[..., Range]] = {
    "mul": lambda a, b: _corners("mul", a, b),
    "min": lambda a, b: _min_or_max("min", a, b),
    "max": lambda a, b: _min_or_max("max", a, b),
    "floordiv": _floordiv,
    "mod": _mod,
    "abs": _abs,
    "shl": _shift("shl"),
    "shr": _shift("shr"),
    "bitand": _bitand,
}
_FLOAT_RULES: Mapping[str, Callable[..., Range]] = {
    "add": _add,
    "sub": _subtract,
    "mul": lambda a, b: _corners("mul", a, b),
    "div": _divide,
    "min": lambda a, b: _min_or_max("min", a, b),
    "max": lambda a, b: _min_or_max("max", a, b),
    "abs": _abs,
    "neg": lambda a: Range(fold.negate(a.greatest), fold.negate(a.least)),
}
_LOGIC: Mapping[str, Callable[..., Truth]] = {
    "and": lambda a, b: Truth(
        fold.both(a.may_hold, b.may_hold), fold.either(a.may_fail, b.may_fail)
    ),
    "or": lambda a, b: Truth(
        fold.either(a.may_hold, b.may_hold), fold.both(a.may_fail, b.may_fail)
    ),
    "xor": lambda a, b: Truth(
        fold.either(fold.both(a.may_hold, b.may_fail), fold.both(a.may_fail, b.may_hold)),
        fold.either(fold.both(a.may_hold, b.may_hold), fold.both(a.may_fail, b.may_fail)),
    ),
    "select": lambda c, a, b: Truth(
        fold.either(fold.both(c.may_hold, a.may_hold), fold.both(c.may_fail, b.may_hold)),
        fold.either(fold.both(c.may_hold, a.may_fail), fold.both(c.may_fail, b.may_fail)),
    ),
}
