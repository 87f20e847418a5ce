"""Conversions between types, and new numbers of a value's type, under torch's names.

A value inside a functor is to torch a tensor of no dimensions: `x.dtype`, `x.new_full((), 1.0)`,
`torch.zeros_like(x)`, `x.to(torch.uint8)`. Half precision is not there: kernels compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types.ir import Kind, const
from warploom.dsl.types.number_types import LIMITS, fits_scalar, kind_of, wrapped
from warploom.dsl.values import functions, refusals
from warploom.dsl.values.functions import to_int, where
from warploom.dsl.values.symbols import Symbol, Value, wrap


def _small(name: str) -> Callable[[Value], Value]:
    """Conversion to a small type: floats are truncated, and of ints the low bits are kept."""

    def convert(x: Value) -> Value:
        whole = to_int(x) if type_of(x) == "float32" else x
        if isinstance(whole, Symbol):
            return wrap(build.of_type(whole.node, name))
        return np.asanyarray(whole).astype(name)

    return convert


_CONVERSIONS: dict[str, Callable[[Value], Value]] = {
    **dict.fromkeys(("float32", "float64", "float", "double"), functions.to_float),
    **dict.fromkeys(("int32", "int64", "int", "long"), functions.to_int),
    **{name: _small(name) for name in ("uint8", "int8", "int16")},
    "bool": functions.to_bool,
}


def type_of(x: Value) -> str:
    """The type that kernels know a value by."""
    if isinstance(x, Symbol):
        return x.node.type
    found = np.asarray(x).dtype
    if found.kind in "bf":
        return "bool" if found.kind == "b" else "float32"
    return found.name if found.name in LIMITS else "int32"


def _name(dtype: Any) -> str:
    """The name of a torch, NumPy or Python type, or of the type of a value."""
    if isinstance(dtype, (Symbol, np.ndarray)):
        return type_of(dtype)
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).rpartition(".")[2]


def _converted(x: Value, dtype: Any, shown: str) -> Value:
    name = _name(dtype)
    if name not in _CONVERSIONS:
        raise build.refuse(
            f".{shown}({dtype})",
            "Kernels compute in float32, int32, int16, int8, uint8 and bool, on one device: "
            "convert to one of these (int64 and float64 stand for them), or leave it out.",
        )
    return _CONVERSIONS[name](x)


def _to(x: Value, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Value:
    """`x.to(dtype)`, `x.to(other)`, `x.to(x.device)`, in the precision that kernels compute in."""
    if not args and dtype is None and device is None:
        raise build.refuse(".to() of no type", "Give one, such as x.to(torch.float32).")
    for given in (*args, dtype):
        is_place = given is None or type(given).__name__ == "device"
        if not (is_place or isinstance(given, bool)):  # non_blocking and copy are bools
            x = _converted(x, given, "to")
    return x


def _type(x: Value, dtype: Any) -> Value:
    return _converted(x, dtype, "type")


def _number(like: Value, value: Value, dtype: Any) -> Value:
    """One number of a type: of `like`'s, if none is given."""
    name = type_of(like) if dtype is None else _name(dtype)
    if isinstance(value, (Symbol, np.ndarray)):
        return _converted(value, name, "to")
    kind = type_of(_converted(like, name, "to"))  # float64 stands for float32
    if kind_of(kind) is Kind.INT:
        value = int(value)
        if not fits_scalar(value, kind):
            raise build.refuse(f"{value} as {kind}", "Use a number that it holds.")
        value = wrapped(value, kind)
    value = {Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}[kind_of(kind)](value)
    if isinstance(like, Symbol):
        made = const(value)
        return wrap(build.of_type(made, kind) if kind_of(kind) is Kind.INT else made)
    of_numpy = np.float64 if kind == "float32" else kind
    keep = getattr(like, "_keep", np.asarray)
    return keep(np.asarray(value, of_numpy))


def _check_size(x: Value, size: Any) -> None:
    shape = (size,) if isinstance(size, int) else tuple(size)
    if shape and len(shape) != x.ndim:  # arrays of the NumPy reading have more than none
        raise build.refuse(f"a new tensor of shape {shape}", "Use numbers.")


def _new_full(
    x: Value, size: Any, fill_value: Value, *, dtype: Any = None, device: Any = None, **_: Any
) -> Value:
    _check_size(x, size)
    return _number(x, fill_value, dtype)


def _new(value: int) -> Callable[..., Value]:
    """`x.new_ones(())` and `x.new_zeros(())`, which torch's mask helpers begin with."""

    def new(x: Value, size: Any = (), *, dtype: Any = None, device: Any = None, **_: Any) -> Value:
        return _new_full(x, size, value, dtype=dtype)

    return new


def _full_like(
    x: Value, fill_value: Value, *, dtype: Any = None, device: Any = None, **_: Any
) -> Value:
    return _number(x, fill_value, dtype)


def _like(value: int) -> Callable[..., Value]:
    def like(x: Value, *, dtype: Any = None, device: Any = None, **_: Any) -> Value:
        return _number(x, value, dtype)

    return like


def _masked_fill(x: Value, mask: Value, value: Value) -> Value:
    """x, or the value where the mask holds, in the type of x."""
    if type_of(value) == "float32" != type_of(x):
        raise build.refuse(
            f"masked_fill of {type_of(x)} with a float", "Write where(mask, value, x)."
        )
    return where(mask, _number(x, value, None), x)


_NAMES: dict[Callable[..., Any], str] = {
    _to: "to",
    _type: "type type_as",
    _small("uint8"): "byte",
    _small("int8"): "char",
    _small("int16"): "short",
    _new_full: "new_full",
    _new(1): "new_ones",
    _new(0): "new_zeros",
    _full_like: "full_like",
    _like(1): "ones_like",
    _like(0): "zeros_like",
    _masked_fill: "masked_fill",
    (lambda x: type_of(x) == "float32"): "is_floating_point",
    (lambda x: 0): "dim",
}
for _function, _names in _NAMES.items():
    refusals.NAMED.update(dict.fromkeys(_names.split(), _function))
