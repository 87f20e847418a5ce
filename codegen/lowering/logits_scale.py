"""The scale of logits, taken out of the inner loop.

A softmax multiplies each logit with log2(e) in any case, and the products of queries and keys wait
to be multiplied with `sm_scale`. What a transform multiplies all logits with can join the one
factor or the other, so that an element is left with fewer products: of `logits + bias`, the bias
is divided by the scale, mostly once for a row; of `cap * tanh(logits / cap)`, the outer product
goes to the softmax and the inner one to the scale.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from warploom.codegen.lowering.lower import SM_SCALE, reachable
from warploom.codegen.lowering.split import STEPS, Level, inverse, levels
from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import Extents
from warploom.dsl.types.ir import Kind, Node, const, node, substitute

_ONE = const(1.0)
_LOGITS = node("logits", Kind.FLOAT)
_FIXED = (Level.TILE, Level.ROW)
# Of constants in a factor, and of their product, so that a float32 holds it and its inverse.
_LEAST, _MOST = 1e-30, 1e30
# Of a constant that is divided by a factor: fills such as the least float32 would become -inf.
_MOST_DIVIDED = 1e18
_LARGEST = (2 - 2**-23) * 2.0**127  # float32

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
        self._extents = Extents()
        self._of_launch: set[Node] = set()  # reads scalars alone
        self._positive = {SM_SCALE: 1.0}  # times what numbers of a launch make of it
        self.inside: dict[Node, Factored] = {}
        self.outside: dict[Node, Factored] = {}
        for part in parts:
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
            may_divide = self.inside.keys().isdisjoint(condition) and all(
                map(self._divides, others)
            )
            if len(factors) == 1 and factors != {_ONE} and may_divide:
                (factor,) = factors
                rests = tuple(self._divided(term, factor) for term in terms)
                return factor, _with_args(part, condition + rests)
        return _ONE, self.whole(part)

    def _path(self, term: Node) -> tuple[list[tuple[Node, int]], Node]:
        """Products, and which operand leads on, down to what is divided where that costs least."""
        path = []
        while term.op in ("neg", "mul"):
            known = [self._levels[arg].value for arg in term.args]
            path.append((term, known.index(min(known))))
            term = term.args[path[-1][1]]
        return path, term

    def _divides(self, term: Node) -> bool:
        """Whether dividing a term saves something, and cannot make another value of it.

        An element multiplies and adds in one instruction: with a term that is no product, nothing
        is saved. A slope belongs to a row, and is divided there.
        """
        path, divided = self._path(term)
        if _is_small(divided) or _is_infinite(divided):
            return True
        saves = bool(path) and self._levels[divided] is not Level.ELEMENT
        return saves and divided.op != "const"

    def _divided(self, term: Node, factor: Node) -> Node:
        """A term without the factor of all terms."""
        if term in self.outside:
            return self.outside[term][1]
        path, divided = self._path(term)
        made = divided
        if not _is_infinite(divided):
            made = _finite(_as_float(divided), inverse(factor))
        for outer, place in reversed(path):
            made = _with_args(outer, (*outer.args[:place], made, *outer.args[place + 1 :]))
        return made


def _is_small(current: Node) -> bool:
    """Whether a part is sure to be far from what overflows: a whole number, or a fair constant."""
    if current.op == "const":
        return isinstance(current.attr, int | float) and abs(current.attr) <= _MOST_DIVIDED
    if current.op in ("add", "sub", "neg"):
        return all(map(_is_small, current.args))
    return current.kind is Kind.INT or current.op == "to_float"


def _is_infinite(current: Node) -> bool:
    return current.op == "const" and current.attr in (float("inf"), float("-inf"))


def _finite(value: Node, factor: Node) -> Node:
    """Their product, but what is finite stays so: a row of such terms is no empty one."""
    made = node("mul", Kind.FLOAT, (value, factor), source=value.source)
    if _is_small(value):
        return made
    largest = fold.select(_less(value, 0.0), const(-_LARGEST), const(_LARGEST))
    kept = fold.select(_less(_size(value), float("inf")), largest, value)
    return fold.select(_less(_size(made), float("inf")), made, kept)


def _size(value: Node) -> Node:
    return node("abs", Kind.FLOAT, (value,))


def _less(value: Node, than: float) -> Node:
    return node("lt", Kind.BOOL, (value, const(than)))


def _as_float(current: Node) -> Node:
    return current if current.kind is Kind.FLOAT else node("to_float", Kind.FLOAT, (current,))


def _product(factor: Node, other: Node) -> Node:
    return other if factor is _ONE else node("mul", Kind.FLOAT, (factor, _as_float(other)))


def _with_args(current: Node, args: tuple[Node, ...]) -> Node:
    return node(current.op, current.kind, args, current.attr, current.source)
