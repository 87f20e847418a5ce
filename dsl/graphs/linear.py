"""Integer expressions as sums of multiples: what lets `q_pos - kv_pos` keep its exact range.

An expression is taken apart at +, -, negation and multiplication by constants; everything else is
an atom. Terms that cancel are gone, so `q_pos + kv_len >= kv_pos + kv_len` is seen for what it
is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.dsl.graphs import fold
from warploom.dsl.types.ir import Kind, Node, const


@dataclass(frozen=True)
class Linear:
    """sum of coefficient * atom, plus a constant; no coefficient is 0."""

    terms: Mapping[Node, int] = field(default_factory=dict)
    constant: int = 0

    def __add__(self, other: Linear) -> Linear:
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        kept = {atom: factor for atom, factor in terms.items() if factor}
        return Linear(kept, self.constant + other.constant)

    def __mul__(self, factor: int) -> Linear:
        if factor == 0:
            return Linear()
        scaled = {atom: factor * count for atom, count in self.terms.items()}
        return Linear(scaled, factor * self.constant)

    def __sub__(self, other: Linear) -> Linear:
        return self + other * -1

    def node(self) -> Node:
        """The sum as one expression, positive terms first."""
        positive, negative = self._sides()
        if positive is None:
            total = const(self.constant)
            return fold.arithmetic("sub", total, negative) if negative is not None else total
        total = positive if negative is None else fold.arithmetic("sub", positive, negative)
        if self.constant < 0:
            return fold.arithmetic("sub", total, const(-self.constant))
        return fold.arithmetic("add", total, const(self.constant))

    def compare(self, op: str) -> Node:
        """The truth of `self op 0`, with negative terms moved to the right side."""
        positive, negative = self._sides()
        left, right = positive or const(0), negative or const(0)
        if self.constant > 0:
            left = fold.arithmetic("add", left, const(self.constant))
        else:
            right = fold.arithmetic("add", right, const(-self.constant))
        return fold.compare(op, left, right)

    def _sides(self) -> tuple[Node | None, Node | None]:
        sides: list[Node | None] = [None, None]
        for atom, factor in self.terms.items():
            term = fold.arithmetic("mul", const(abs(factor)), atom)
            side = int(factor < 0)
            before = sides[side]
            sides[side] = term if before is None else fold.arithmetic("add", before, term)
        return sides[0], sides[1]


def linear(root: Node) -> Linear:
    """Take an INT expression apart."""
    if root.kind is Kind.INT:
        value = fold.int_value(root)
        if value is not None:
            return Linear({}, value)
        if root.op in ("add", "sub"):
            left, right = map(linear, root.args)
            return left + right if root.op == "add" else left - right
        if root.op == "neg":
            return linear(root.args[0]) * -1
        if root.op == "mul":
            left, right = map(linear, root.args)
            if not left.terms:
                return right * left.constant
            if not right.terms:
                return left * right.constant
    return Linear({root: 1})
