"""Activation functions under torch's names (`torch.nn.functional`), made of what graphs know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types.ir import Kind
from warploom.dsl.values.functions import (
    abs,
    clamp,
    erf,
    exp,
    expm1,
    log1p,
    maximum,
    minimum,
    sigmoid,
    tanh,
    where,
)
from warploom.dsl.values.symbols import Symbol, Value

# Of selu, so that it keeps mean and variance (Klambauer et al., 2017); the digits are torch's.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def is_float(*values: Value) -> bool:
    """True if one of these numbers is a float."""
    return any(
        x.kind is Kind.FLOAT if isinstance(x, Symbol) else np.asarray(x).dtype.kind == "f"
        for x in values
    )


def relu(x: Value, inplace: Literal[False] = False) -> Value:
    return maximum(x, 0.0 if is_float(x) else 0)


def silu(x: Value, inplace: Literal[False] = False) -> Value:
    return x * sigmoid(x)


def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    if approximate != "tanh":
        raise build.refuse(f"gelu with approximate={approximate!r}", "It is 'none' or 'tanh'.")
    return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))


def softplus(x: Value, beta: Value = 1, threshold: Value = 20) -> Value:
    scaled = x * beta
    soft = (maximum(scaled, 0.0) + log1p(exp(-abs(scaled)))) / beta
    return where(scaled > threshold, x, soft)


def log_sigmoid(x: Value) -> Value:
    return minimum(x, 0.0) - log1p(exp(-abs(x)))


def elu(x: Value, alpha: Value = 1.0, inplace: Literal[False] = False) -> Value:
    return where(x > 0, x, alpha * expm1(x))


def leaky_relu(x: Value, negative_slope: Value = 0.01, inplace: Literal[False] = False) -> Value:
    return where(x > 0, x, negative_slope * x)


def selu(x: Value, inplace: Literal[False] = False) -> Value:
    return _SELU_SCALE * elu(x, _SELU_ALPHA)


def celu(x: Value, alpha: float = 1.0, inplace: Literal[False] = False) -> Value:
    return where(x > 0, x, alpha * expm1(x / alpha))


def mish(x: Value, inplace: Literal[False] = False) -> Value:
    return x * tanh(softplus(x))


def softsign(x: Value) -> Value:
    return x / (1.0 + abs(x))


def tanhshrink(x: Value) -> Value:
    return x - tanh(x)


def softshrink(x: Value, lambd: float = 0.5) -> Value:
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0.0))  # NaN stays


def hardshrink(x: Value, lambd: float = 0.5) -> Value:
    return where((x >= -lambd) & (x <= lambd), 0.0, x)


def threshold(x: Value, threshold: float, value: float, inplace: Literal[False] = False) -> Value:
    return where(x <= threshold, value, x)


def hardtanh(
    x: Value, min_val: float = -1.0, max_val: float = 1.0, inplace: Literal[False] = False
) -> Value:
    return clamp(x, min_val, max_val)


def relu6(x: Value, inplace: Literal[False] = False) -> Value:
    return clamp(x, 0.0, 6.0)


def hardsigmoid(x: Value, inplace: Literal[False] = False) -> Value:
    return clamp(x + 3.0, 0.0, 6.0) / 6.0


def hardswish(x: Value, inplace: Literal[False] = False) -> Value:
    return x * hardsigmoid(x)


ACTIVATIONS: dict[Callable[..., Any], str] = {
    relu: "relu",
    relu6: "relu6",
    silu: "silu",
    gelu: "gelu",
    softplus: "softplus",
    log_sigmoid: "log_sigmoid logsigmoid",
    elu: "elu",
    selu: "selu",
    celu: "celu",
    leaky_relu: "leaky_relu",
    mish: "mish",
    softsign: "softsign",
    tanhshrink: "tanhshrink",
    softshrink: "softshrink",
    hardshrink: "hardshrink",
    threshold: "threshold",
    hardtanh: "hardtanh",
    hardsigmoid: "hardsigmoid",
    hardswish: "hardswish",
}
