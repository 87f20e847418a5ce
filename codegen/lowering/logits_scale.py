"""The scale of logits, taken out of the inner loop.

A softmax multiplies each logit with log2(e) in any case, and the products of queries and keys wait
to be multiplied with `sm_scale`. What a transform multiplies all logits with can join the one
factor or the other, so that an element is left with fewer products: of `logits + slope * distance`,
the slope is divided by the scale, once for a row; of `cap * tanh(logits / cap)`, the outer product
goes to the softmax and the inner one to the scale.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf, prod

from warploom.codegen.lowering.lower import SM_SCALE, reachable
from warploom.codegen.lowering.split import STEPS, Level, inverse, levels
from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import Extents
from warploom.dsl.types.ir import Kind, Node, const, node, substitute

_ONE = const(1.0)
_LOGITS = node("logits", Kind.FLOAT)
_FIXED = (Level.TILE, Level.ROW)
_INFINITE = (const(inf), const(-inf))
# Of constants in a factor, and of their product, so that a float32 holds it and its inverse.
_LEAST, _MOST = 1e-30, 1e30
# Of a term that is divided by a factor, without `sm_scale`, and of a slope that is: a float32 holds
# the quotient and its product with a distance. Fills such as the least float32 would become -inf.
_MOST_DIVIDED, _STEEPEST = 1e18, 1e20
_MOST_FACTORS = 8  # of a term that is divided

_SIZES: Mapping[str, Callable[..., float]] = {
    "mul": operator.mul,
    "div": operator.truediv,
    "min": min,
    "to_float": float,
}

Factored = tuple[Node, Node]  # a factor and the rest; their product is the value


def with_scale_outside(transform: Node, softmax: bool) -> Factored:
    """A factor of all logits, and the rest of a transform.

    Args:
        transform: root of a logits transform, of logits that were multiplied with the scale.
        softmax: whether a softmax follows, which can take a factor.

    Returns:
        A factor above 0 that reads scalars alone, and a transform of q.k itself. Their product is
        the transform that was given, but for rounding.
    """
    parts = list(reachable([transform]))
    rewrite = _Rewrite(parts)
    if transform not in rewrite.inside or rewrite.has_steps(parts):
        scaled = node("mul", Kind.FLOAT, (_LOGITS, SM_SCALE))
        return _ONE, substitute(transform, {_LOGITS: scaled})
    return rewrite.outside[transform] if softmax else (_ONE, rewrite.whole(transform))


class _Rewrite:
    """What is known of the parts of a transform, operands first; nothing is worked out twice.

    Attributes:
        inside: of each part that reads logits, of q.k itself: what it is multiplied with, which is
            the same along a row, and the rest.
        outside: the same, of a part that the result grows with: a factor that the softmax can have.
    """

    def __init__(self, parts: Sequence[Node]) -> None:
        self._levels = levels(parts)
        self._bounds: dict[Node, float] = {}  # of the size of constants, whole numbers, their sums
        self._extents = Extents()
        self._of_launch: set[Node] = set()  # reads scalars alone
        self._positive = {SM_SCALE: 1.0}  # times what numbers of a launch make of it
        self.inside: dict[Node, Factored] = {}
        self.outside: dict[Node, Factored] = {}
        for part in parts:
            self._bound(part)
            if part is _LOGITS:
                self.inside[part] = self.outside[part] = (SM_SCALE, part)
            elif self.inside.keys().isdisjoint(part.args):
                self._look_at(part)
            else:
                self.inside[part] = self._inside(part)
                self.outside[part] = self._outside(part)

    def has_steps(self, parts: Sequence[Node]) -> bool:
        """Whether some result jumps with the logits, and should do so where the user's does."""
        steps = (part for part in parts if part.op in STEPS)
        return any(arg in self.inside for step in steps for arg in step.args)

    def whole(self, part: Node) -> Node:
        """The value of a part; factors that follow each other are one."""
        if part not in self.inside:
            return part
        factor, rest = self.inside[part]
        return rest if factor is _ONE else node("mul", Kind.FLOAT, (rest, factor))

    def _look_at(self, part: Node) -> None:
        """Whether a part without logits reads scalars alone, and is sure to be above 0."""
        if part.op in ("var", "load", "element") or not self._of_launch.issuperset(part.args):
            return
        self._of_launch.add(part)
        size = self._least_size(part)
        if size is not None and _LEAST <= size <= _MOST:
            self._positive[part] = size

    def _least_size(self, part: Node) -> float | None:
        """What constants alone make of a part that is above 0; None if it may not be."""
        if part.op == "const":
            return part.attr if isinstance(part.attr, int | float) else None
        sizes = [self._positive[arg] for arg in part.args if arg in self._positive]
        if part.op == "max":
            return max(sizes, default=None)
        may_wrap = part.kind is not Kind.FLOAT and self._extents.may_wrap(part)
        if may_wrap or len(sizes) < len(part.args) or part.op not in _SIZES:
            return None
        return _SIZES[part.op](*sizes)

    def _inside(self, part: Node) -> Factored:
        if part.op == "mul":
            for moving, factor in (part.args, part.args[::-1]):
                if factor not in self.inside and self._levels[factor] in _FIXED:
                    inner, rest = self.inside[moving]
                    return _product(inner, factor), rest
        return _ONE, _with_args(part, tuple(map(self.whole, part.args)))

    def _outside(self, part: Node) -> Factored:
        if part.op == "mul":
            for moving, factor in (part.args, part.args[::-1]):
                if factor in self._positive:
                    outer, rest = self.outside[moving]
                    size = self._positive.get(outer, 1.0) * self._positive[factor]
                    if _LEAST <= size <= _MOST:
                        product = _product(outer, factor)
                        self._positive[product] = size
                        return product, rest
        if part.op in ("add", "sub", "neg", "select"):
            condition = part.args[:1] if part.op == "select" else ()
            terms = part.args[len(condition) :]
            factors = {self.outside[term][0] for term in terms if term in self.outside}
            others = [term for term in terms if term not in self.outside]
            if len(factors) == 1 and factors != {_ONE} and self.inside.keys().isdisjoint(condition):
                (factor,) = factors
                if all(self._divides(term, factor) for term in others):
                    rests = tuple(self._divided(term, factor) for term in terms)
                    return factor, _with_args(part, condition + rests)
        return _ONE, self.whole(part)

    def _bound(self, part: Node) -> None:
        """Notes what a part is sure not to be beyond, if it is a number or one of positions."""
        known = [self._bounds.get(arg) for arg in part.args]
        if part.op == "const" and isinstance(part.attr, int | float):
            self._bounds[part] = abs(part.attr)
        elif part.op in ("add", "sub", "neg") and None not in known:
            self._bounds[part] = sum(filter(None, known))
        elif part.kind is Kind.INT or part.op == "to_float":
            self._bounds[part] = 2.0**32
        elif part.op == "mul" and None not in known:
            self._bounds[part] = prod(filter(None, known))

    def _divides(self, term: Node, factor: Node) -> bool:
        """Whether dividing a term saves something, and cannot make another value of it.

        An element multiplies and adds in one instruction: with a term that is no product, nothing
        is saved. A slope of distances belongs to a row, and is divided there.
        """
        if term in _INFINITE:
            return True
        if term in self._bounds:
            return self._bounds[term] <= _MOST_DIVIDED * self._positive.get(factor, 1.0)
        slopes, distances = self._product(term)
        of_distances = prod(self._bounds.get(distance, inf) for distance in distances)
        return bool(slopes) and bool(distances) and of_distances <= _MOST_DIVIDED

    def _divided(self, term: Node, factor: Node) -> Node:
        """A term without the factor of all terms."""
        if term in self.outside:
            return self.outside[term][1]
        if term in _INFINITE:
            return term
        slopes, distances = self._product(term)
        if not slopes or not distances:
            return node("mul", Kind.FLOAT, (_as_float(term), inverse(factor)), source=term.source)
        slope = reduce(_product, slopes, _ONE)
        made = node("mul", Kind.FLOAT, (slope, inverse(factor)), source=term.source)
        if term not in self._bounds:
            made = _not_steeper([one for one in slopes if one not in self._bounds], slope, made)
        return reduce(_product, distances, made)

    def _product(self, term: Node) -> tuple[list[Node], list[Node]]:
        """Factors of a term that are the same along a row, and others; none if there are many."""
        slopes, others, waiting = list[Node](), list[Node](), [term]
        while waiting and len(waiting) + len(slopes) + len(others) <= _MOST_FACTORS:
            current = waiting.pop()
            if self._levels[current] in _FIXED:
                slopes.append(current)
            elif current.op == "neg":
                slopes.append(const(-1.0))
                waiting.append(current.args[0])
            elif current.op == "mul":
                waiting.extend(reversed(current.args))
            else:
                others.append(current)
        return ([], []) if waiting else (slopes, others)


def _not_steeper(inputs: Sequence[Node], slope: Node, divided: Node) -> Node:
    """A slope that was divided; of finite inputs it is finite, or rows of such terms were empty.

    Their product may be none where that with a distance of 0 is.
    """
    low, high = const(-_STEEPEST), const(_STEEPEST)
    kept = node("min", Kind.FLOAT, (node("max", Kind.FLOAT, (divided, low)), high))
    for part in inputs:
        kept = fold.select(_less(node("abs", Kind.FLOAT, (part,)), inf), kept, slope)
    return kept


def _less(value: Node, than: float) -> Node:
    return node("lt", Kind.BOOL, (value, const(than)))


def _as_float(current: Node) -> Node:
    return current if current.kind is Kind.FLOAT else node("to_float", Kind.FLOAT, (current,))


def _product(factor: Node, other: Node) -> Node:
    return other if factor is _ONE else node("mul", Kind.FLOAT, (factor, _as_float(other)))


def _with_args(current: Node, args: tuple[Node, ...]) -> Node:
    return node(current.op, current.kind, args, current.attr, current.source)
