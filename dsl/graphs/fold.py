"""Constructors that fold as they build, for graphs made by analysis rather than by a user.

Constants and equal operands disappear, so that rules can be written without cases and the code
that comes out is short. Integers fold exactly; floats are left alone, because they are computed
in two precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from warploom.dsl.types.ir import Kind, Node, const, node

TRUE, FALSE = const(True), const(False)

_INT_OPS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
}
_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
# The same with its sides changed over, and what holds where it does not.
TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def int_value(value: Node) -> int | None:
    """The integer a node is, if it is a constant."""
    if value.op == "const" and value.kind is Kind.INT:
        assert isinstance(value.attr, int)
        return value.attr
    return None


def arithmetic(op: str, a: Node, b: Node) -> Node:
    """An operation of two nodes of one kind."""
    left, right = int_value(a), int_value(b)
    if left is not None and right is not None and op in _INT_OPS:
        return const(_INT_OPS[op](left, right))
    if op in ("min", "max") and a is b:
        return a
    if op in ("add", "sub") and right == 0:
        return a
    if op == "add" and left == 0:
        return b
    if op in ("mul", "floordiv") and right == 1:
        return a
    if op == "mul" and left == 1:
        return b
    return node(op, a.kind, (a, b))


def negate(a: Node) -> Node:
    value = int_value(a)
    if value is not None:
        return const(-value)
    return a.args[0] if a.op == "neg" else node("neg", a.kind, (a,))


def compare(op: str, a: Node, b: Node) -> Node:
    left, right = int_value(a), int_value(b)
    if left is not None and right is not None:
        return const(_COMPARE[op](left, right))
    if a is b and a.kind is Kind.INT:
        return const(_COMPARE[op](0, 0))
    return node(op, Kind.BOOL, (a, b))


def both(a: Node, b: Node) -> Node:
    if FALSE in (a, b):
        return FALSE
    if a is TRUE or a is b:
        return b
    return a if b is TRUE else node("and", Kind.BOOL, (a, b))


def conjuncts(a: Node) -> Iterator[Node]:
    """The conditions that all must hold for this one to hold."""
    if a.op != "and":
        yield a
        return
    for arg in a.args:
        yield from conjuncts(arg)


def either(a: Node, b: Node) -> Node:
    if TRUE in (a, b):
        return TRUE
    if a is FALSE or a is b:
        return b
    return a if b is FALSE else node("or", Kind.BOOL, (a, b))


def invert(a: Node) -> Node:
    """Not; of an integer comparison, the opposite comparison (a float's NaN has none)."""
    if a.op == "const":
        return FALSE if a is TRUE else TRUE
    if a.op == "not":
        return a.args[0]
    if a.op in OPPOSITE and a.args[0].kind is Kind.INT:
        return node(OPPOSITE[a.op], Kind.BOOL, a.args)
    return node("not", Kind.BOOL, (a,))


def select(condition: Node, if_true: Node, if_false: Node) -> Node:
    if condition.op == "const":
        return if_true if condition is TRUE else if_false
    if if_true is if_false:
        return if_true
    return node("select", if_true.kind, (condition, if_true, if_false))
