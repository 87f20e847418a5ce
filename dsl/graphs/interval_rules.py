"""The rules of interval arithmetic, each written once.

A `Range` holds graphs for the least and greatest value of a number over a box of positions, a
`Truth` holds graphs for whether a condition may hold and may fail somewhere in it. A rule takes
those of the operands and gives that of the result. `Box` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import INT32, Extent
from warploom.dsl.types.ir import Kind, Node, const, node

NAN = const(float("nan"))


@dataclass(frozen=True)
class Range:
    """Least and greatest value; None where there is no bound. A float without bounds may be NaN."""

    least: Node | None = None
    greatest: Node | None = None

    @property
    def point(self) -> Node | None:
        """The one value of the whole box, if there is only one."""
        return self.least if self.least is self.greatest else None

    @property
    def ends(self) -> tuple[Node, Node] | None:
        """Both bounds, if both are there."""
        if self.least is None or self.greatest is None:
            return None
        return self.least, self.greatest

    def apply(self, function: Callable[[Node], Node]) -> Range:
        """Range of a function that never decreases."""
        low = None if self.least is None else function(self.least)
        if self.point is not None:
            return Range(low, low)
        return Range(low, None if self.greatest is None else function(self.greatest))


@dataclass(frozen=True)
class Truth:
    """What a condition can be somewhere in the box."""

    may_hold: Node = fold.TRUE
    may_fail: Node = fold.TRUE

    @property
    def point(self) -> Node | None:
        """The one answer of the whole box, if there is only one."""
        return self.may_hold if self.may_fail is fold.invert(self.may_hold) else None


UNKNOWN = Range()


def outside(a: Range, limits: Extent = INT32) -> Node:
    """Whether 32 bits, or a type of these limits, may not hold all of a range of ints."""
    if a.ends is None:
        return fold.TRUE
    least, greatest = map(const, limits)
    return fold.either(
        fold.compare("lt", a.ends[0], least), fold.compare("gt", a.ends[1], greatest)
    )


def wrapped(a: Range, limits: Extent = INT32) -> Range:
    """What 32 bits make of ints: one value exactly, a range that they hold as it is, else any.

    The same of a smaller type, by its limits.
    """
    least, greatest = map(const, limits)
    if a.ends is None:
        return UNKNOWN if limits == INT32 else Range(least, greatest)
    if a.point is not None:
        size = const(limits[1] - limits[0] + 1)
        low_bits = fold.arithmetic("mod", fold.arithmetic("sub", a.point, least), size)
        value = fold.arithmetic("add", low_bits, least)
        return Range(value, value)
    leaves = outside(a, limits)
    return Range(fold.select(leaves, least, a.ends[0]), fold.select(leaves, greatest, a.ends[1]))


def hull(condition: Truth, a: Range, b: Range) -> Range:
    """`select`: one side where the condition is certain, else both."""

    def bound(op: str, x: Node | None, y: Node | None) -> Node | None:
        if x is None or y is None:
            return None
        if condition.point is not None:  # and one value, if both sides are
            return fold.select(condition.point, x, y)
        undecided = fold.select(condition.may_hold, fold.arithmetic(op, x, y), y)
        return fold.select(condition.may_fail, undecided, x)

    return Range(bound("min", a.least, b.least), bound("max", a.greatest, b.greatest))


def _corners(op: str) -> Callable[[Range, Range], Range]:
    """An operation that is monotone in each operand: its extremes are at corners of the box."""

    def rule(a: Range, b: Range) -> Range:
        if a.ends is None or b.ends is None:
            return UNKNOWN
        lefts, rights = a.ends[: 1 if a.point else 2], b.ends[: 1 if b.point else 2]
        values = [fold.arithmetic(op, left, right) for left in lefts for right in rights]
        least = greatest = values[0]
        for value in values[1:]:
            least = fold.arithmetic("min", least, value)
            greatest = fold.arithmetic("max", greatest, value)
        return Range(least, greatest)

    return rule


def _corners_of_first(op: str) -> Callable[[Range, Range], Range]:
    """An operation that is monotone in its first operand if the second is fixed."""
    rule = _corners(op)
    return lambda a, b: rule(a, b) if b.point else UNKNOWN


def _min_or_max(op: str) -> Callable[[Range, Range], Range]:
    def bound(x: Node | None, y: Node | None, needs_both: bool) -> Node | None:
        if x is None or y is None:
            return None if needs_both else (x or y)
        return fold.arithmetic(op, x, y)

    return lambda a, b: Range(
        bound(a.least, b.least, op == "min"), bound(a.greatest, b.greatest, op == "max")
    )


def _mod(a: Range, b: Range) -> Range:
    """Within one period of the modulus the remainder rises; elsewhere only its limits are known."""
    period = b.point
    if period is None:
        return UNKNOWN
    one, zero = const(1), const(0)
    lowest = fold.arithmetic("min", fold.arithmetic("add", period, one), zero)
    highest = fold.arithmetic("max", fold.arithmetic("sub", period, one), zero)
    if a.ends is None:
        return Range(lowest, highest)
    periods = [fold.arithmetic("floordiv", end, period) for end in a.ends]
    least, greatest = (fold.arithmetic("mod", end, period) for end in a.ends)
    is_inside = fold.compare("eq", *periods)
    return Range(fold.select(is_inside, least, lowest), fold.select(is_inside, greatest, highest))


def _abs(a: Range) -> Range:
    if a.ends is None:
        return Range(const(0))
    least, greatest = a.ends
    zero = const(0) if least.kind is Kind.INT else const(0.0)
    distance = fold.arithmetic("max", least, fold.negate(greatest))  # from 0, if 0 is outside
    return Range(
        fold.arithmetic("max", distance, zero),
        fold.arithmetic("max", greatest, fold.negate(least)),
    )


def _bitand(a: Range, b: Range) -> Range:
    """A constant mask that is not negative bounds the result."""
    masks = [fold.int_value(r.point) for r in (a, b) if r.point is not None]
    limits = [mask for mask in masks if mask is not None and mask >= 0]
    return Range(const(0), const(min(limits))) if limits else UNKNOWN


def _divide(a: Range, b: Range) -> Range:
    """Monotone where the divisor keeps its sign; NaN, which means unknown, elsewhere."""
    if b.ends is None:
        return UNKNOWN
    keeps_sign = fold.either(
        fold.compare("gt", b.ends[0], const(0.0)), fold.compare("lt", b.ends[1], const(0.0))
    )
    return _corners("div")(a, b).apply(lambda bound: fold.select(keeps_sign, bound, NAN))


def _sum(a: Range, b: Range) -> Range:
    if a.ends is None or b.ends is None:
        return UNKNOWN
    return Range(*(fold.arithmetic("add", x, y) for x, y in zip(a.ends, b.ends, strict=True)))


def _negative(a: Range) -> Range:
    return UNKNOWN if a.ends is None else Range(*(fold.negate(x) for x in reversed(a.ends)))


# Sums of integers are not here: `Box` keeps them as linear forms.
INT_RULES: Mapping[str, Callable[..., Range]] = {
    "mul": _corners("mul"),
    "min": _min_or_max("min"),
    "max": _min_or_max("max"),
    "floordiv": _corners_of_first("floordiv"),
    "mod": _mod,
    "abs": _abs,
    "shl": _corners_of_first("shl"),
    "shr": _corners_of_first("shr"),
    "bitand": _bitand,
}
# All bounds of the operands are there: a float with an unknown operand is unknown.
FLOAT_RULES: Mapping[str, Callable[..., Range]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, _negative(b)),
    "mul": _corners("mul"),
    "div": _divide,
    "min": _min_or_max("min"),
    "max": _min_or_max("max"),
    "abs": _abs,
    "neg": _negative,
}
LOGIC_RULES: Mapping[str, Callable[..., Truth]] = {
    "not": lambda a: Truth(a.may_fail, a.may_hold),
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

# Functions of floats that never decrease, and the least argument for which the rule holds.
MONOTONE: Mapping[str, float | None] = {
    **dict.fromkeys(("exp", "exp2", "tanh", "sigmoid", "erf", "floor", "ceil")),
    **dict.fromkeys(("expm1", "atan", "sinh")),
    "sqrt": 0.0,
    "log": 1e-30,
    "log2": 1e-30,
    "log1p": -0.999,
}


def monotone(op: str, a: Range) -> Range:
    """A rising function; NaN, which means unknown, where its argument may be too small for it."""
    smallest = MONOTONE[op]

    def value(bound: Node) -> Node:
        found = node(op, Kind.FLOAT, (bound,), ("precise",))
        if smallest is None or a.least is None:
            return found
        return fold.select(fold.compare("ge", a.least, const(smallest)), found, NAN)

    return a.apply(value)
