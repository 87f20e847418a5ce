"""Functions under the names by which torch, NumPy and methods of values ask for them.

What the graph says exactly is lowered to its operations; for what it does not, `UNTRACED` holds
what to write instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from warploom.dsl.graphs import build
from warploom.dsl.values import functions, refusals
from warploom.dsl.values.activations import ACTIVATIONS, is_float
from warploom.dsl.values.conversions import type_of
from warploom.dsl.values.functions import abs, ceil, floor, maximum, sigmoid, where
from warploom.dsl.values.symbols import Symbol, Value
from warploom.dsl.values.words import Words


def _add(a: Value, b: Value, *, alpha: Value = None) -> Value:
    return a + (b if alpha is None else alpha * b)


def _sub(a: Value, b: Value, *, alpha: Value = None) -> Value:
    return a - (b if alpha is None else alpha * b)


def _rsub(a: Value, b: Value, *, alpha: Value = None) -> Value:
    return _sub(b, a, alpha=alpha)


def _square(x: Value) -> Value:
    x = functions.to_int(x) if type_of(x) == "bool" else x  # as a power of it
    return x * x


def _reciprocal(x: Value) -> Value:
    return 1.0 / x


def _div(a: Value, b: Value, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return a // b
    if rounding_mode != "trunc":
        what = f"torch.div with rounding_mode={rounding_mode!r}"
        raise build.refuse(what, "It is None, 'floor' or 'trunc'.")
    if is_float(a, b):
        return _trunc(a / b)
    below = a // b  # rounded down, as Python does
    return where((a % b != 0) & (below < 0), below + 1, below)


def _trunc(x: Value) -> Value:
    return where(x < 0, ceil(x), floor(x)) if is_float(x) else x


def _round(x: Value, decimals: int = 0) -> Value:
    if decimals:
        raise build.refuse(f"rounding to {decimals} decimals", "Scale before and after it.")
    if not is_float(x):
        return x
    below = floor(x)
    over = x - below  # NaN for infinities, which stay
    up = (over > 0.5) | ((over == 0.5) & (below % 2.0 == 1.0))  # halves go to even numbers
    return where(up, below + 1.0, below)


def _sign(x: Value) -> Value:
    if type_of(x) == "bool":
        return x
    one, zero = (1.0, 0.0) if is_float(x) else (1, x * 0)  # of the type of x
    return where(x > 0, one, where(x < 0, -one, zero))  # 0 for NaN, as torch says


def _lerp(start: Value, end: Value, weight: Value) -> Value:
    """From the nearer end, as torch does: it is then reached exactly."""
    step = end - start
    return where(abs(weight) < 0.5, start + weight * step, end - step * (1.0 - weight))


def _is_finite(x: Value) -> Value:
    return ~(functions.isnan(x) | functions.isinf(x))


def _elementwise(name: str, function: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """`torch.max(a, b)`; with one value, or a dimension, torch's reduces a tensor."""

    def of_two(x: Value, other: Value = None, **others: Value) -> Value:
        if others or other is None or (isinstance(x, Symbol) and isinstance(other, int)):
            raise build.refuse(f"{name} over a dimension", _REDUCED)
        return function(x, other)

    return of_two


_REDUCED = "Write maximum(a, b) or minimum(a, b); over lanes, max(x)."


def _reflected(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """As tensors are asked when they stand on the right of a value that they do not know."""
    return lambda a, b: operation(b, a)


_FOREIGN: dict[Callable[..., Any], str] = {
    _add: "add",
    _sub: "sub subtract",
    _rsub: "rsub",
    operator.mul: "mul multiply",
    _div: "div divide true_divide",
    operator.floordiv: "floor_divide floordiv",
    operator.mod: "remainder",
    operator.pow: "pow power",
    operator.and_: "and bitwise_and",
    operator.or_: "or bitwise_or",
    operator.xor: "xor bitwise_xor",
    operator.lshift: "lshift left_shift bitwise_left_shift",
    operator.rshift: "rshift right_shift bitwise_right_shift",
    _reflected(operator.truediv): "rdiv",
    _reflected(operator.floordiv): "rfloordiv",
    _reflected(operator.mod): "rmod",
    _reflected(operator.pow): "rpow",
    _reflected(operator.lshift): "rlshift",
    _reflected(operator.rshift): "rrshift",
    operator.lt: "lt less",
    operator.le: "le less_equal",
    operator.gt: "gt greater",
    operator.ge: "ge greater_equal",
    operator.eq: "eq",
    operator.ne: "ne not_equal",
    operator.neg: "neg negative",
    operator.invert: "invert bitwise_not",
    where: "where",
    abs: "abs absolute fabs",
    sigmoid: "sigmoid expit special_expit",
    functions.clamp: "clamp clip",
    functions.to_int: "int long",
    functions.to_float: "float double",
    functions.to_bool: "bool",
    _trunc: "trunc fix",
    _round: "round rint",
    _sign: "sign",
    _square: "square",
    _reciprocal: "reciprocal",
    _lerp: "lerp",
    _is_finite: "isfinite",
    _elementwise("max", maximum): "max",
    _elementwise("min", functions.minimum): "min",
    functions.log1p: "log1p special_log1p",
    functions.expm1: "expm1 special_expm1",
    functions.atan: "atan arctan",
}
_SAME_NAME = "exp exp2 log log2 sqrt rsqrt tanh sin cos erf floor ceil minimum maximum"
_SAME_NAME += " tan sinh cosh fmod isnan isinf logical_and logical_or logical_xor logical_not"
for _function, _names in (_FOREIGN | ACTIVATIONS).items():
    refusals.NAMED.update(dict.fromkeys(_names.split(), _function))
refusals.NAMED.update({name: getattr(functions, name) for name in _SAME_NAME.split()})

_UNTRACED: dict[str, str | Words] = {
    "equal": "Write a == b, which compares element by element.",
    "half bfloat16": "Kernels compute in float32: leave it out.",
    "astype": "Write x.float(), x.int(), x.bool() or x.to(torch.float32).",
    "amax amin": _REDUCED,
    "sum mean": "Write warploom's sum(x) or mean(x), over the lanes of a vector.",
    "norm linalg_norm linalg_vector_norm normalize rms_norm layer_norm": (
        "Write x * rsqrt(mean(x * x) + epsilon), or the like."
    ),
    "setitem fill_ copy_ index_put index_put_ scatter scatter_": refusals.UNCHANGING,
    "clone detach contiguous": "Leave it out: values do not change.",
    "nan_to_num": "Write where(isnan(x), 0.0, x).",
    "cumsum cumprod sort argsort topk argmax argmin": refusals.ONE_PAIR,
    "softmax log_softmax logsumexp": refusals.ONE_PAIR,
    "interp searchsorted bucketize digitize": refusals.AS_TABLE,
    "gather take index_select take_along_dim embedding": "Index the tensor: table[i].",
    "isin": "Write (x == a) | (x == b), or index a table of bools.",
    "tril triu": "Compare positions, as in q_idx >= kv_idx, which is a mask.",
    "matmul rmatmul mm bmm mv dot einsum linear": refusals.NO_PRODUCTS,
}
for _names, _remedy in _UNTRACED.items():
    refusals.UNTRACED.update(dict.fromkeys(_names.split(), _remedy))
