"""Typed construction of IR: the rules that turn operands of any kind into one well-typed node.

Kinds promote bool -> int -> float, as in NumPy. Each rule gives the kind that NumPy gives, so that
a functor means the same in the kernel and in the NumPy reading.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TypeGuard

from warploom.dsl import location
from warploom.dsl.extents import within
from warploom.dsl.ir import Kind, Node, const, node
from warploom.errors import CannotTrace

_RANK = {Kind.BOOL: 0, Kind.INT: 1, Kind.FLOAT: 2}
_MAX_EXPANDED_POWER = 64
PRECISE = ("precise",)


def make(op: str, kind: Kind, *args: Node, attr: Hashable = None) -> Node:
    """The node with these parts; a new one gets the user's line as its source."""
    made = node(op, kind, args, attr)
    if made.source is None:
        made.source = location.source(location.here())
    return made


def refuse(what: str, remedy: str) -> CannotTrace:
    """The error for `what`, placed at the user's line."""
    return CannotTrace(what=what, remedy=remedy, source=location.source(location.here()))


def constant(value: bool | int | float) -> Node:
    """A literal; ints must fit the kernel's 32 bits."""
    if isinstance(value, int) and not within((value, value)):
        low = (value + 2**31) % 2**32 - 2**31
        remedy = f"Integers have 32 bits in a kernel: use a float, or {low}, its low 32 bits."
        raise refuse(f"the integer {value}", remedy)
    if isinstance(value, float) and math.isnan(value):
        value = math.nan  # one NaN object, so that two traces agree
    return const(value)


def to_kind(value: Node, kind: Kind) -> Node:
    """Promote or truncate `value` to a kind; a number becomes a bool by comparing it with 0."""
    if value.kind is kind:
        return value
    if value.op == "const":
        literal = value.attr
        if kind is Kind.INT and isinstance(literal, float) and not math.isfinite(literal):
            raise refuse(f"{literal} as an int", "Use a finite number.")
        as_python = {Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}[kind]
        return constant(as_python(literal))
    if kind is Kind.BOOL:
        return make("ne", Kind.BOOL, value, to_kind(constant(0), value.kind))
    if value.kind is Kind.BOOL:
        return make("select", kind, value, to_kind(constant(1), kind), to_kind(constant(0), kind))
    return make("to_float" if kind is Kind.FLOAT else "to_int", kind, value)


def promote(*values: Node) -> tuple[Node, ...]:
    """Bring all to the widest kind among them."""
    widest = max((value.kind for value in values), key=_RANK.__getitem__)
    return tuple(to_kind(value, widest) for value in values)


def _numbers(op: str, *values: Node) -> tuple[Node, ...]:
    promoted = promote(*values)
    if promoted[0].kind is Kind.BOOL:
        raise refuse(
            f"{op} of bools",
            "Combine bools with &, | and ~, or turn one into a number with where(b, 1, 0).",
        )
    return promoted


def arithmetic(op: str, left: Node, right: Node) -> Node:
    """`add`, `sub`, `mul`, `floordiv`, `mod`, `min`, `max` in the operands' common kind."""
    a, b = _numbers(op, left, right)
    return make(op, a.kind, a, b)


def true_divide(left: Node, right: Node) -> Node:
    """Division; of ints too it gives a float."""
    a, b = _numbers("/", left, right)
    return make("div", Kind.FLOAT, to_kind(a, Kind.FLOAT), to_kind(b, Kind.FLOAT))


def power(base: Node, exponent: Node) -> Node:
    """`base ** exponent`; small constant powers become products, 2.0 ** x becomes exp2(x)."""
    a, b = _numbers("**", base, exponent)
    n = exponent.attr if exponent.op == "const" else None
    if is_product(n):
        return _product(a, int(n))
    if a.kind is Kind.FLOAT and isinstance(n, (int, float)) and is_product(-n):
        return true_divide(constant(1.0), _product(a, int(-n)))
    a, b = to_kind(a, Kind.FLOAT), to_kind(b, Kind.FLOAT)
    if a.op == "const" and a.attr == 2.0:
        return make("exp2", Kind.FLOAT, b)
    return make("pow", Kind.FLOAT, a, b)


def is_product(exponent: object) -> TypeGuard[int | float]:
    """Whether a power with this exponent is so many factors, and so an int if its base is one."""
    if not isinstance(exponent, (int, float)) or not 0 <= exponent <= _MAX_EXPANDED_POWER:
        return False
    return int(exponent) == exponent


def _product(base: Node, count: int) -> Node:
    """base ** count by repeated squaring."""
    if count == 0:
        return to_kind(constant(1), base.kind)
    if count == 1:
        return base
    half = _product(base, count // 2)
    square = make("mul", base.kind, half, half)
    return make("mul", base.kind, square, base) if count % 2 else square


def compare(op: str, left: Node, right: Node) -> Node:
    """`lt`, `le`, `gt`, `ge`, `eq`, `ne`; a bool, of any kinds."""
    a, b = promote(left, right)
    if a.kind is Kind.BOOL:
        if op not in ("eq", "ne"):
            a, b = to_kind(a, Kind.INT), to_kind(b, Kind.INT)
        else:
            differ = make("xor", Kind.BOOL, a, b)
            return differ if op == "ne" else make("not", Kind.BOOL, differ)
    return make(op, Kind.BOOL, a, b)


_BITWISE = {"and": "bitand", "or": "bitor", "xor": "bitxor"}
_SIGNS = {"and": "&", "or": "|", "xor": "^"}


def logic(op: str, left: Node, right: Node) -> Node:
    """`and`, `or`, `xor`: logic on two bools, bitwise on two ints."""
    if left.kind is Kind.INT and right.kind is Kind.INT:
        return make(_BITWISE[op], Kind.INT, left, right)
    if left.kind is not Kind.BOOL or right.kind is not Kind.BOOL:
        raise refuse(
            f"{_SIGNS[op]} of {left.kind.value} and {right.kind.value}",
            "Both sides must be bools or both ints; compare a number with something first.",
        )
    for literal, other in ((left, right), (right, left)):
        if literal.op == "const" and op != "xor":
            absorbing = literal.attr is (op == "or")
            return literal if absorbing else other
    return make(op, Kind.BOOL, left, right)


def invert(value: Node) -> Node:
    """`~`: not of a bool, complement of an int."""
    if value.kind is Kind.BOOL:
        if value.op == "const":
            return constant(not value.attr)
        return make("not", Kind.BOOL, value)
    return make("bitxor", Kind.INT, _ints("~", value)[0], constant(-1))


def shift(op: str, left: Node, right: Node) -> Node:
    """`shl` and `shr` of ints."""
    a, b = _ints("a shift", left, right)
    return make(op, Kind.INT, a, b)


def _ints(what: str, *values: Node) -> tuple[Node, ...]:
    for value in values:
        if value.kind is not Kind.INT:
            raise refuse(f"{what} of a {value.kind.value}", "It needs ints; use to_int(x) first.")
    return values


def negate(value: Node) -> Node:
    (a,) = _numbers("negation", value)
    return make("neg", a.kind, a)


def absolute(value: Node) -> Node:
    (a,) = _numbers("abs", value)
    return make("abs", a.kind, a)


def math_function(op: str, value: Node, precise: bool = False) -> Node:
    """A function of one float; ints are promoted."""
    (a,) = _numbers(op, value)
    return make(op, Kind.FLOAT, to_kind(a, Kind.FLOAT), attr=PRECISE if precise else None)


def select(condition: Node, if_true: Node, if_false: Node) -> Node:
    if condition.kind is not Kind.BOOL:
        raise refuse(
            f"where with a condition of kind {condition.kind.value}",
            "The condition must be a bool; compare the number with something.",
        )
    a, b = promote(if_true, if_false)
    if condition.op == "const":
        return a if condition.attr else b
    return a if a is b else make("select", a.kind, condition, a, b)
