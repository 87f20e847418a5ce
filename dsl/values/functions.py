"""Functions a functor may call: on symbols they build IR, on anything else they are NumPy's.

A vector (in query, key, value and output transforms) is one expression per lane in the IR, and an
array [rows, head_dim] in the NumPy reading. Rotations and reductions act over the head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.dsl.graphs import build, lanes, rotations
from warploom.dsl.graphs.extents import INT32
from warploom.dsl.types.ir import Kind, Node
from warploom.dsl.types.number_types import SMALL
from warploom.dsl.values import refusals
from warploom.dsl.values.symbols import Symbol, Value, as_node, wrap


def _symbolic(*values: Value) -> bool:
    return any(isinstance(value, Symbol) for value in values)


def where(condition: Value, if_true: Value, if_false: Value) -> Value:
    """Choose by a condition: what `if` would do, for values known only in the kernel."""
    if _symbolic(condition, if_true, if_false):
        return wrap(build.select(as_node(condition), as_node(if_true), as_node(if_false)))
    return np.where(condition, if_true, if_false)


def _unary(op: str, numpy_function: Callable[[Any], Any], meaning: str) -> Callable[..., Value]:
    def function(x: Value, *, precise: bool = False) -> Value:
        if isinstance(x, Symbol):
            return wrap(build.math_function(op, x.node, precise))
        return numpy_function(x)

    function.__name__ = function.__qualname__ = op
    exact = "`precise=True` forbids the fast, less exact instruction of GPUs."
    function.__doc__ = f"{meaning}\n\n    {exact}"
    return function


def _numpy_sigmoid(x: Any) -> Any:
    x = x * 1.0  # small ints would wrap
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(np.asarray(x) >= 0, 1 / (1 + small), small / (1 + small))


_erf = np.frompyfunc(math.erf, 1, 1)


def _numpy_erf(x: Any) -> Any:
    return np.asanyarray(_erf(x)).astype(np.float64)


exp = _unary("exp", np.exp, "e to the x.")
exp2 = _unary("exp2", np.exp2, "2 to the x.")
log = _unary("log", np.log, "Natural logarithm.")
log2 = _unary("log2", np.log2, "Logarithm to base 2.")
sqrt = _unary("sqrt", np.sqrt, "Square root.")
rsqrt = _unary("rsqrt", lambda x: 1 / np.sqrt(x), "One over the square root.")
tanh = _unary("tanh", np.tanh, "Hyperbolic tangent.")
sigmoid = _unary("sigmoid", _numpy_sigmoid, "1 / (1 + exp(-x)).")
sin = _unary("sin", np.sin, "Sine of radians.")
cos = _unary("cos", np.cos, "Cosine of radians.")
erf = _unary("erf", _numpy_erf, "Gauss error function.")
log1p = _unary("log1p", np.log1p, "Natural logarithm of 1 + x, exact for small x, too.")
expm1 = _unary("expm1", np.expm1, "e to the x, less 1, exact for small x, too.")
tan = _unary("tan", np.tan, "Tangent of radians.")
atan = _unary("atan", np.arctan, "Angle in radians whose tangent is x.")
sinh = _unary("sinh", np.sinh, "Hyperbolic sine.")
cosh = _unary("cosh", np.cosh, "Hyperbolic cosine.")


def floor(x: Value) -> Value:
    """Largest whole number not above x, as a float."""
    if isinstance(x, Symbol):
        return wrap(build.math_function("floor", x.node))
    return np.floor(x, dtype=np.float64)  # NumPy 2.1 and later leave whole numbers as they are


def ceil(x: Value) -> Value:
    """Smallest whole number not below x, as a float."""
    if isinstance(x, Symbol):
        return wrap(build.math_function("ceil", x.node))
    return np.ceil(x, dtype=np.float64)  # NumPy 2.1 and later leave whole numbers as they are


def abs(x: Value) -> Value:
    """Absolute value, of the same kind as x."""
    return wrap(build.absolute(x.node)) if isinstance(x, Symbol) else np.abs(x)


def minimum(a: Value, b: Value) -> Value:
    """The smaller of two values, element by element."""
    if _symbolic(a, b):
        return wrap(build.arithmetic("min", as_node(a), as_node(b)))
    return np.minimum(a, b)


def maximum(a: Value, b: Value) -> Value:
    """The larger of two values, element by element."""
    if _symbolic(a, b):
        return wrap(build.arithmetic("max", as_node(a), as_node(b)))
    return np.maximum(a, b)


def fmod(a: Value, b: Value) -> Value:
    """What a division that rounds toward 0 leaves: of the sign of a, where % has that of b."""
    if _symbolic(a, b):
        return wrap(build.fmod(as_node(a), as_node(b)))
    return np.fmod(a, b)


def isnan(x: Value) -> Value:
    """True of NaN alone."""
    if isinstance(x, Symbol):
        return wrap(build.float_test("is_nan", x.node))
    return np.isnan(x)


def isinf(x: Value) -> Value:
    """True of infinity and of minus infinity."""
    if isinstance(x, Symbol):
        return wrap(build.float_test("is_inf", x.node))
    return np.isinf(x)


def clamp(x: Value, min: Value = None, max: Value = None) -> Value:
    """x held between two bounds; None is no bound."""
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


def to_int(x: Value) -> Value:
    """Truncate toward zero to an int; beyond 32 bits it is the nearest, True is 1 and NaN is 0."""
    if isinstance(x, Symbol) or np.asarray(x).dtype.kind != "f":
        return _cast(x, Kind.INT, np.int32)
    exact = np.asarray(x, np.float64)  # single precision has no 2^31 - 1
    whole = np.asarray(np.nan_to_num(np.clip(exact, *INT32), nan=0.0), np.int32)
    return whole.view(type(x)) if isinstance(x, np.ndarray) else whole[()]


def to_float(x: Value) -> Value:
    """Turn an int or a bool into a float."""
    return _cast(x, Kind.FLOAT, np.float64)


def to_bool(x: Value) -> Value:
    """True where x is not 0."""
    return _cast(x, Kind.BOOL, np.bool_)


def _cast(x: Value, kind: Kind, numpy_type: type) -> Value:
    if isinstance(x, Symbol):
        if x.node.type in SMALL and kind is Kind.INT:
            return wrap(build.of_type(x.node, "int32"))
        return wrap(build.to_kind(x.node, kind))
    return np.asanyarray(x).astype(numpy_type)


# --- logic under NumPy's and torch's names


def logical_and(a: Value, b: Value) -> Value:
    """`&` of two truth values; numbers count as true where they are not 0."""
    return to_bool(a) & to_bool(b)


def logical_or(a: Value, b: Value) -> Value:
    """`|` of two truth values."""
    return to_bool(a) | to_bool(b)


def logical_xor(a: Value, b: Value) -> Value:
    """`^` of two truth values."""
    return to_bool(a) ^ to_bool(b)


def logical_not(a: Value) -> Value:
    """`~` of a truth value."""
    return ~to_bool(a)


# --- vectors


def rotate_half(x: Value, dim: int | None = None) -> Value:
    """(-x2, x1) for x = (x1, x2) cut in halves: the partner of each lane in Llama's RoPE.

    Args:
        x: a vector, [rows, head_dim] in the NumPy reading.
        dim: rotate only the first `dim` lanes, an even int; the others are returned as they are.

    Returns:
        A vector like x.

    Raises:
        ArgumentError: a `dim` that is odd, not above 0, or more than the vector has lanes.
        CannotTrace: x is the same in all lanes.
    """
    return _permute(x, lanes.half_partner, dim)


def rotate_pairs(x: Value, dim: int | None = None) -> Value:
    """(-x1, x0, -x3, x2, ...) for x = (x0, x1, x2, x3, ...): the partner in interleaved RoPE.

    Arguments, what is returned and what is raised are those of `rotate_half`.
    """
    return _permute(x, lanes.pair_partner, dim)


def _permute(x: Value, partner: lanes.Partner, dim: int | None) -> Value:
    if dim is not None:
        dim = lanes.checked_dim(dim)
        rotations.record(dim)
    if not isinstance(x, Symbol):
        return lanes.permute_array(x, partner, dim)
    return wrap(lanes.permute_node(_vector("a rotation", x), partner, dim))


def sum(x: Value) -> Value:
    """Sum over the head dimension: one number per row ([rows, 1] in the NumPy reading)."""
    if isinstance(x, Symbol):
        return wrap(lanes.reduce_node("sum_lanes", _vector("sum", x)))
    return np.sum(x * 1.0, axis=-1, keepdims=True)  # floats, as in kernels, also of ints


def max(x: Value) -> Value:
    """Largest lane: one number per row ([rows, 1] in the NumPy reading)."""
    if isinstance(x, Symbol):
        return wrap(lanes.reduce_node("max_lanes", _vector("max", x)))
    return np.max(x * 1.0, axis=-1, keepdims=True)


def mean(x: Value) -> Value:
    """Mean over the head dimension: one number per row ([rows, 1] in the NumPy reading)."""
    if isinstance(x, Symbol):
        total = lanes.reduce_node("sum_lanes", _vector("mean", x))
        return wrap(build.true_divide(total, lanes.HEAD_DIM))
    return np.mean(x, axis=-1, keepdims=True)


def _vector(what: str, x: Symbol) -> Node:
    if not lanes.is_vector(x.node):
        raise build.refuse(
            f"{what} of a value that is the same in all lanes",
            "It needs a vector: the argument of a query, key, value or output transform.",
        )
    return x.node


for _function in (
    *(where, exp, exp2, log, log2, sqrt, rsqrt, tanh, sin, cos, erf, floor, ceil, sigmoid, abs),
    *(log1p, expm1, tan, atan, sinh, cosh, fmod, isnan, isinf),
    *(minimum, maximum, clamp, to_int, to_float, to_bool, rotate_half, rotate_pairs),
    *(sum, mean, max),
):
    refusals.PUBLIC.append(_function.__name__)
