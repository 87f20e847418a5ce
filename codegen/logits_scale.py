"""The scale of logits, taken out of the inner loop.

A softmax multiplies each logit with log2(e) in any case, and the products of queries and keys wait
to be multiplied with `sm_scale`. What a transform multiplies all logits with can join the one
factor or the other, so that an element is left with fewer products: of `logits + bias`, the bias
is divided by the scale, mostly once for a row; of `cap * tanh(logits / cap)`, the outer product
goes to the softmax and the inner one to the scale.
"""

from __future__ import annotations

from math import isinf

from warploom.codegen.lower import SM_SCALE, reachable
from warploom.codegen.split import STEPS, Level, inverse, levels
from warploom.dsl.ir import Kind, Node, const, node, substitute

_ONE = const(1.0)
_LOGITS = node("logits", Kind.FLOAT)
_FIXED = (Level.TILE, Level.ROW)


def with_scale_outside(transform: Node, softmax: bool) -> tuple[Node, Node]:
    """A factor of all logits, and the rest of a transform.

    Args:
        transform: root of a logits transform, of logits that were multiplied with the scale.
        softmax: whether a softmax follows, which can take a factor.

    Returns:
        A factor above 0 that reads scalars alone, and a transform of q.k itself. Their product is
        the transform that was given, but for rounding.
    """
    if _has_steps(transform):  # a result that jumps should do so where the user's does
        scaled = node("mul", Kind.FLOAT, (_LOGITS, SM_SCALE))
        return _ONE, substitute(transform, {_LOGITS: scaled})
    return _outside(transform) if softmax else (_ONE, _inside(transform))


def _outside(current: Node) -> tuple[Node, Node]:
    """The same for a part that the result grows with."""
    if current is _LOGITS:
        return SM_SCALE, current
    moving = [arg for arg in current.args if _reads_logits(arg)]
    if current.op == "mul" and len(moving) == 1:
        (factor,) = (arg for arg in current.args if arg is not moving[0])
        if _is_positive(factor):
            outer, rest = _outside(moving[0])
            return _product(outer, factor), rest
    if current.op in ("add", "sub", "neg", "select"):
        condition = current.args[:1] if current.op == "select" else ()
        terms = current.args[len(condition) :]
        parts = {term: _outside(term) for term in terms if _reads_logits(term)}
        factors = {factor for factor, _ in parts.values()}
        if len(factors) == 1 and factors != {_ONE} and not any(map(_reads_logits, condition)):
            (outer,) = factors
            made = {term: part for term, (_, part) in parts.items()}
            made |= {t: _multiplied(t, inverse(outer)) for t in terms if t not in parts}
            return outer, _with_args(current, condition + tuple(made[term] for term in terms))
    return _ONE, _inside(current)


def _inside(current: Node) -> Node:
    """The same value, of q.k itself; factors that follow each other are one."""
    factor, rest = _factored(current)
    return rest if factor is _ONE else node("mul", Kind.FLOAT, (rest, factor))


def _factored(current: Node) -> tuple[Node, Node]:
    if current is _LOGITS:
        return SM_SCALE, current
    if not _reads_logits(current):
        return _ONE, current
    if current.op == "mul":
        for moving, factor in (current.args, current.args[::-1]):
            if not _reads_logits(factor) and levels([factor])[factor] in _FIXED:
                inner, rest = _factored(moving)
                return _product(inner, factor), rest
    return _ONE, _with_args(current, tuple(_inside(arg) for arg in current.args))


def _multiplied(current: Node, by: Node) -> Node:
    """A product with what reads scalars alone, made where it costs least."""
    if current.op == "const" and isinstance(current.attr, float) and isinf(current.attr):
        return current
    if current.op == "neg":
        return _with_args(current, (_multiplied(current.args[0], by),))
    if current.op == "mul":
        known = levels([current])
        first, second = current.args
        if known[first].value <= known[second].value:
            return _with_args(current, (_multiplied(first, by), second))
        return _with_args(current, (first, _multiplied(second, by)))
    return node("mul", Kind.FLOAT, (_as_float(current), by), source=current.source)


def _as_float(current: Node) -> Node:
    return current if current.kind is Kind.FLOAT else node("to_float", Kind.FLOAT, (current,))


def _product(factor: Node, other: Node) -> Node:
    return other if factor is _ONE else node("mul", Kind.FLOAT, (factor, _as_float(other)))


def _with_args(current: Node, args: tuple[Node, ...]) -> Node:
    return node(current.op, current.kind, args, current.attr, current.source)


def _reads_logits(root: Node) -> bool:
    return _LOGITS in reachable([root])


def _has_steps(transform: Node) -> bool:
    steps = (current for current in reachable([transform]) if current.op in STEPS)
    return any(_reads_logits(arg) for current in steps for arg in current.args)


def _is_positive(value: Node) -> bool:
    """Whether it is sure to be above 0, and the same for the whole launch."""
    if value.op == "const":
        return isinstance(value.attr, float) and value.attr > 0.0 and not isinf(value.attr)
    if value.op == "max":
        of_launch = all(arg.op not in ("var", "load", "element") for arg in reachable([value]))
        return of_launch and any(map(_is_positive, value.args))
    if value.op in ("mul", "div"):
        return all(map(_is_positive, value.args))
    return value is SM_SCALE
