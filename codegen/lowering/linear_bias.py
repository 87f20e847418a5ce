"""Biases that grow evenly from key to key, taken out of a logits transform (ALiBi).

Of `logits + slope * (kv_pos - q_pos)` an element needs no distance of its own. Columns of a tile
have consecutive positions, so what it gets beyond that of the tile's first column is the slope
times a constant of the code. The rest is the same along a row, and the softmax takes it as a shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.lowering.split import Level, levels
from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import Extents
from warploom.dsl.graphs.linear import Linear
from warploom.dsl.types.ir import Kind, Node, const, node, var

_FIXED = (Level.TILE, Level.ROW)
_ONE, _MINUS_ONE = const(1.0), const(-1.0)
_KV_POS = var("kv_pos")


@dataclass(frozen=True)
class LinearBias:
    """slope * (kv_pos - origin).

    Attributes:
        slope: a float that is the same along a row.
        origin: a whole number that is the same along a row.
    """

    slope: Node
    origin: Linear

    @property
    def is_distance(self) -> bool:
        """Whether it is a whole number, of either sign."""
        return self.slope in (_ONE, _MINUS_ONE)

    def node(self) -> Node:
        as_float = node("to_float", Kind.FLOAT, ((Linear({_KV_POS: 1}) - self.origin).node(),))
        return as_float if self.slope is _ONE else node("mul", Kind.FLOAT, (self.slope, as_float))

    def negated(self) -> LinearBias:
        if self.is_distance:
            return LinearBias(_ONE if self.slope is _MINUS_ONE else _MINUS_ONE, self.origin)
        return LinearBias(fold.negate(self.slope), self.origin)

    def times(self, factor: Node) -> LinearBias:
        if self.is_distance:
            bias = LinearBias(factor, self.origin)
            return bias if self.slope is _ONE else bias.negated()
        return LinearBias(node("mul", Kind.FLOAT, (self.slope, factor)), self.origin)

    def plus(self, number: Linear) -> LinearBias:
        """A distance and a whole number."""
        back = number if self.slope is _ONE else number * -1
        return LinearBias(self.slope, self.origin - back)


Terms = tuple[Node | None, LinearBias | None]  # of a sum: a bias, and all others


def without_linear_bias(transform: Node) -> tuple[Node, LinearBias | None]:
    """The terms of a transform but one, and that one, if it grows evenly from key to key."""
    biases = _biases(transform)
    found: dict[Node, Terms] = {}
    for part in levels([transform]):
        if part in biases:
            found[part] = None, biases[part]
        elif part.op in ("add", "sub", "neg") and part.kind is Kind.FLOAT:
            found[part] = _terms(part, found)
        else:
            found[part] = part, None
    rest, bias = found[transform]
    return (transform, None) if rest is None or bias is None else (rest, bias)


def _terms(total: Node, found: Mapping[Node, Terms]) -> Terms:
    """Those of a sum, a difference or a negation, from those of its operands."""
    first = found[total.args[0]] if total.op != "neg" else (None, None)
    rest, bias = found[total.args[-1]]
    if bias is not None and first[1] is not None:
        return total, None  # of two biases, none is better
    if bias is not None and total.op != "add":
        bias = bias.negated()
    if rest is not None and first[0] is not None:
        is_same = (first[0], rest) == total.args
        rest = total if is_same else node(total.op, Kind.FLOAT, (first[0], rest))
    elif rest is not None and total.op != "add":
        rest = fold.negate(rest)
    return (first[0] if rest is None else rest), (first[1] if bias is None else bias)


def _biases(transform: Node) -> dict[Node, LinearBias]:
    """Which parts are such biases; nothing is worked out twice."""
    found = {_KV_POS: LinearBias(_ONE, Linear())}
    known = levels([transform])
    extents = Extents()
    for part in known:
        if part.kind is Kind.INT and extents.may_wrap(part):
            continue  # it may grow by 1 from key to key, and then jump
        of_keys = [arg for arg in part.args if arg in found]
        others = [arg for arg in part.args if arg not in found]
        if len(of_keys) == 1 and all(known[arg] in _FIXED for arg in others):
            bias = _of_operation(part, found[of_keys[0]], others)
            if bias is not None:
                found[part] = bias
    return found


def _of_operation(part: Node, bias: LinearBias, others: list[Node]) -> LinearBias | None:
    """What an operation makes of a bias, and of what is the same along a row."""
    if part.op in ("neg", "to_float"):
        return bias.negated() if part.op == "neg" else bias
    if part.op == "mul" and part.kind is Kind.FLOAT:
        return bias.times(others[0])
    if part.op not in ("add", "sub") or not bias.is_distance:
        return None
    other = others[0].args[0] if others[0].op == "to_float" else others[0]
    if other.kind is not Kind.INT:
        return None
    # Floats hold sums that whole numbers do not, but a difference of two positions is safe.
    is_safe = other.op == "var" and bias.origin == Linear()
    if part.kind is Kind.FLOAT and not is_safe:
        return None
    value = fold.int_value(other)
    number = Linear({other: 1}) if value is None else Linear({}, value)
    if part.op == "sub" and others[0] is part.args[0]:
        return bias.negated().plus(number)
    return bias.plus(number if part.op == "add" else number * -1)
