"""Typed construction of IR: the rules that turn operands of any type into one well-typed node.

`number_types` says what types give together, here as in the NumPy reading, so that a functor means
the same in both. Small integers are computed in 32 bits, and a cast after each operation makes of
the result what their type holds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TypeGuard

from warploom.dsl.graphs.extents import within
from warploom.dsl.types import location
from warploom.dsl.types.ir import Kind, Node, const, node
from warploom.dsl.types.number_types import SMALL, fits_scalar, kind_of, result_type, wrapped
from warploom.errors import CannotTrace

_MAX_EXPANDED_POWER = 64
PRECISE = ("precise",)


def make(op: str, kind: Kind, *args: Node, attr: Hashable = None) -> Node:
    """The node with these parts; a new one gets the user's line as its source."""
    made = node(op, kind, args, attr)
    if made.source is None:
        made.source = location.source(location.here())
    return made


def refuse(what: str, remedy: object) -> CannotTrace:
    """The error for `what`, placed at the user's line; `remedy` is a sentence, or its `Words`."""
    return CannotTrace(what=what, remedy=str(remedy), source=location.source(location.here()))


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


def is_python(value: Node) -> bool:
    """Whether a node is a Python number, which takes the type of what it meets."""
    return value.op == "const" and value.kind is not Kind.BOOL


def of_type(value: Node, name: str) -> Node:
    """An int as one of another type; of what the type does not hold, the low bits."""
    if value.type == name and not is_python(value):
        return value
    value = to_kind(value, Kind.INT)
    if value.op in ("load", "scalar"):  # casts of these say what is stored
        value = read_as(value, "int32")
    return make("cast", Kind.INT, value, attr=name)


def read_as(read: Node, name: str) -> Node:
    """What is read from a tensor, or is a scalar, of a type: nothing happens to the number."""
    return make("cast", Kind.INT, read, attr=name)


def common_type(*values: Node) -> str:
    """The type that an operation of these computes in."""
    python = {value: value.kind for value in values if is_python(value)}
    return result_type((v.type for v in values if v not in python), python.values())


def promote(*values: Node) -> tuple[str, tuple[Node, ...]]:
    """The type of an operation, and its operands as numbers of that type."""
    name = common_type(*values)
    return name, tuple(_promoted(value, name) for value in values)


def _promoted(value: Node, name: str) -> Node:
    if value.op == "cast" and value.args[0].op == "const":
        (value,) = value.args  # its type has been counted
    if name in SMALL and value.op == "const" and value.kind is Kind.INT:
        assert isinstance(value.attr, int)
        return const(wrapped(value.attr, name))
    return to_kind(value, kind_of(name))


def _result(name: str, made: Node) -> Node:
    """What a type makes of the number that 32 bits have."""
    is_held = name not in SMALL or made.type == name
    return made if is_held else make("cast", Kind.INT, made, attr=name)


def _check_scalars(name: str, *values: Node) -> None:
    """Refuse Python ints that torch does not take for numbers of this type."""
    for value in values:
        literal = value.attr
        if not (name in SMALL and is_python(value) and isinstance(literal, int)):
            continue
        if not fits_scalar(literal, name):
            remedy = f"Use a number that it holds, or widen the {name} first, with x.int()."
            raise refuse(f"{literal} as {name}", remedy)


def _numbers(op: str, *values: Node) -> tuple[str, tuple[Node, ...]]:
    name, promoted = promote(*values)
    if name == "bool":
        raise refuse(
            f"{op} of bools",
            "Combine bools with &, | and ~, or turn one into a number with where(b, 1, 0).",
        )
    return name, promoted


# What torch makes of bools: sums and products of truths are truths.
_OF_BOOLS = {"add": "or", "mul": "and", "max": "or", "min": "and"}


def refused_difference(left: str, right: str) -> CannotTrace:
    """The error for `-` beside a bool, which torch does not take either; of two types' names."""
    remedy = "Of bools, a & ~b or a ^ b may be meant; where(b, 1, 0) makes a number of one."
    return refuse(f"- of {left} and {right}", remedy)


def arithmetic(op: str, left: Node, right: Node) -> Node:
    """`add`, `sub`, `mul`, `floordiv`, `mod`, `min`, `max` in the operands' common type."""
    if op == "sub" and Kind.BOOL in (left.kind, right.kind):
        raise refused_difference(left.type, right.type)
    if op in _OF_BOOLS and common_type(left, right) == "bool":
        return logic(_OF_BOOLS[op], left, right)
    name, (a, b) = _numbers(op, left, right)
    if op in ("min", "max"):
        _check_scalars(name, left, right)
    return _result(name, make(op, a.kind, a, b))


def true_divide(left: Node, right: Node) -> Node:
    """Division; of ints and bools too it gives a float."""
    _, (a, b) = promote(left, right)
    return make("div", Kind.FLOAT, to_kind(a, Kind.FLOAT), to_kind(b, Kind.FLOAT))


def power(base: Node, exponent: Node) -> Node:
    """`base ** exponent`; small constant powers become products, 2.0 ** x becomes exp2(x)."""
    name, (a, b) = _numbers("**", base, exponent)
    literal = exponent.args[0] if exponent.op == "cast" else exponent
    n = literal.attr if literal.op == "const" else None
    if is_product(n):
        return _product(name, a, int(n))
    if name in SMALL:
        what = f"a power of {name} whose exponent is no constant of 0 to {_MAX_EXPANDED_POWER}"
        raise refuse(what, "Widen it first, with x.int() or x.float().")
    if a.kind is Kind.FLOAT and isinstance(n, (int, float)) and is_product(-n):
        return true_divide(constant(1.0), _product(name, a, int(-n)))
    a, b = to_kind(a, Kind.FLOAT), to_kind(b, Kind.FLOAT)
    if a.op == "const" and a.attr == 2.0:
        return make("exp2", Kind.FLOAT, b)
    return make("pow", Kind.FLOAT, a, b)


def is_product(exponent: object) -> TypeGuard[int | float]:
    """Whether a power with this exponent is so many factors, and so an int if its base is one."""
    if not isinstance(exponent, (int, float)) or not 0 <= exponent <= _MAX_EXPANDED_POWER:
        return False
    return int(exponent) == exponent


def _product(name: str, base: Node, count: int) -> Node:
    """base ** count by repeated squaring, in a type."""
    if count == 0:
        return _result(name, to_kind(constant(1), base.kind))
    if count == 1:
        return _result(name, base)
    half = _product(name, base, count // 2)
    square = _result(name, make("mul", base.kind, half, half))
    return _result(name, make("mul", base.kind, square, base)) if count % 2 else square


def compare(op: str, left: Node, right: Node) -> Node:
    """`lt`, `le`, `gt`, `ge`, `eq`, `ne`; a bool, of any kinds."""
    _, (a, b) = promote(left, right)
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
    """`and`, `or`, `xor`: logic on two bools, bitwise on ints, for which bools are 0 and 1."""
    if Kind.FLOAT in (left.kind, right.kind):
        raise refuse(
            f"{_SIGNS[op]} of {left.kind.value} and {right.kind.value}",
            "Both sides must be bools or ints; compare a number with something first.",
        )
    if Kind.INT in (left.kind, right.kind):
        name, (a, b) = promote(left, right)
        return _result(name, make(_BITWISE[op], Kind.INT, a, b))
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
    name, (a,) = _ints("~", value)
    return _result(name, make("bitxor", Kind.INT, a, constant(-1)))


def shift(op: str, left: Node, right: Node) -> Node:
    """`shl` and `shr` of ints."""
    name, (a, b) = _ints("a shift", left, right)
    return _result(name, make(op, Kind.INT, a, b))


def _ints(what: str, *values: Node) -> tuple[str, tuple[Node, ...]]:
    for value in values:
        if value.kind is not Kind.INT:
            raise refuse(f"{what} of a {value.kind.value}", "It needs ints; use to_int(x) first.")
    return promote(*values)


def negate(value: Node) -> Node:
    name, (a,) = _numbers("negation", value)
    return _result(name, make("neg", a.kind, a))


def positive(value: Node) -> Node:
    _numbers("a plus sign", value)
    return value


def absolute(value: Node) -> Node:
    name, (a,) = _numbers("abs", value)
    return _result(name, make("abs", a.kind, a))


def math_function(op: str, value: Node, precise: bool = False) -> Node:
    """A function of one float; ints are promoted, and bools but where torch rounds none."""
    _, (a,) = _numbers(op, value) if op in ("floor", "ceil") else promote(value)
    return make(op, Kind.FLOAT, to_kind(a, Kind.FLOAT), attr=PRECISE if precise else None)


def float_test(op: str, value: Node) -> Node:
    """`is_nan` or `is_inf`; a bool, which is False of ints."""
    _, (a,) = promote(value)
    return make(op, Kind.BOOL, a) if a.kind is Kind.FLOAT else constant(False)


def fmod(left: Node, right: Node) -> Node:
    """The remainder that has the sign of `left`; of ints, 0 where `right` is 0."""
    _, (a, b) = _numbers("fmod", left, right)
    if a.kind is Kind.FLOAT:
        return make("fmod", Kind.FLOAT, a, b)
    rest, zero = arithmetic("mod", a, b), constant(0)
    differ = logic("xor", compare("lt", a, zero), compare("lt", b, zero))
    is_of_other_sign = logic("and", compare("ne", rest, zero), differ)
    return select(is_of_other_sign, arithmetic("sub", rest, b), rest)


def select(condition: Node, if_true: Node, if_false: Node) -> Node:
    if condition.kind is not Kind.BOOL:
        raise refuse(
            f"where with a condition of kind {condition.kind.value}",
            "The condition must be a bool; compare the number with something.",
        )
    name, (a, b) = promote(if_true, if_false)
    _check_scalars(name, if_true, if_false)
    if condition.op == "const":
        return _result(name, a if condition.attr else b)
    return _result(name, a if a is b else make("select", a.kind, condition, a, b))
