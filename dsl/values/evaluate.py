"""The NumPy reading of graphs: floats in 64 bits, over whole arrays at once.

It runs the graphs of tile analysis, and checks lowered code in tests. It is not the oracle: that
one calls the user's functors and never sees a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.dsl.types.ir import UNARY_MATH, Kind, Node, walk
from warploom.dsl.values import functions

Array = NDArray[Any]

_TYPES = {Kind.BOOL: np.bool_, Kind.INT: np.int64, Kind.FLOAT: np.float64}
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(functions, name) for name in UNARY_MATH - {"neg"}},
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "fmod": np.fmod,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "select": np.where,
    "to_int": functions.to_int,
    "to_float": np.asarray,
}


def evaluate(
    roots: tuple[Node, ...],
    positions: Mapping[str, Array],
    scalars: Mapping[str, bool | int | float],
    tensors: Mapping[str, Array],
    *,
    logits: Array | float = 0.0,
    functions_by_name: Mapping[str, Callable[..., Any]] | None = None,
    wide: bool = False,
) -> tuple[Array, ...]:
    """Values of some graphs.

    Args:
        roots: graphs without reductions over lanes.
        positions: arrays of position variables, broadcast against each other.
        scalars: values of scalar fields.
        tensors: values of tensor fields; indices are clamped into them, as in kernels.
        logits: value of the `logits` leaf.
        functions_by_name: Python twins of custom functions.
        wide: compute integers in 64 bits, as graphs of tile analysis ask; else they wrap at 32.

    Returns:
        One array per root: bool, int64 or float64.
    """
    values: dict[Node, Array] = {}
    with np.errstate(all="ignore"):  # both sides of a select are computed
        for current in walk(*roots):
            args = [values[arg] for arg in current.args]
            if current.op == "const":
                found: Any = current.attr
            elif current.op == "var":
                found = positions[str(current.attr)]
            elif current.op == "scalar":
                found = scalars[str(current.attr)]
            elif current.op == "logits":
                found = logits
            elif current.op == "load":
                found = _load(tensors[str(current.attr)], args)
            elif current.op == "cast":
                found = np.asarray(args[0]).astype(np.int64).astype(str(current.attr))
            elif current.op == "call":
                found = (functions_by_name or {})[str(current.attr)](*args)
            else:
                found = _OPERATIONS[current.op](*args)
            if current.kind is Kind.INT and not wide:
                found = np.asarray(found).astype(np.int64).astype(np.int32)
            values[current] = np.asarray(found).astype(_TYPES[current.kind])
    return tuple(values[root] for root in roots)


def _load(tensor: Array, indices: list[Array]) -> Array:
    clamped = (
        np.clip(index, 0, size - 1) for index, size in zip(indices, tensor.shape, strict=True)
    )
    found: Array = tensor[tuple(clamped)]
    return found
