"""NumPy arrays as functors see them: torch's function names too, and nothing changes in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

import warploom.dsl.values.conversions
import warploom.dsl.values.foreign  # noqa: F401  (they fill NAMED)
from warploom.dsl.graphs import build
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.number_types import LIMITS, kind_of, result_type, type_of_tensor, wrapped
from warploom.dsl.values.conversions import type_of
from warploom.dsl.values.refusals import NAMED, NO_PARTS, refuse_in_place, remedy_for
from warploom.dsl.values.symbols import FOUND_TENSOR, foreign_dtype

_NUMPY = {Kind.BOOL: np.bool_, Kind.INT: np.int64, Kind.FLOAT: np.float64}


def to_numpy(value: Any, kind: Kind | None = None) -> np.ndarray[Any, Any]:
    """A torch tensor, array or number as bool, int64 or float64 (`kind`; None: the value's own).

    An `Array` of what comes back holds ints of 32 bits, or of their low bits.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        floating = value.is_floating_point()  # bfloat16 has no NumPy twin
        value = (value.double() if floating else value).numpy()
    array = np.asarray(value)
    if kind is None:
        kind = {"b": Kind.BOOL, "i": Kind.INT, "u": Kind.INT}.get(array.dtype.kind, Kind.FLOAT)
    return array.astype(_NUMPY[kind])


# Functions of integers that give integers, or compare them, in the type that they have together.
_OF_NUMBERS = frozenset(
    {"add", "subtract", "multiply", "floor_divide", "remainder", "fmod", "power", "square"}
    | {"minimum", "maximum", "clip", "absolute", "negative", "positive", "sign", "trunc"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift", "rint"}
    | {"floor", "ceil"}
    | {"less", "less_equal", "greater", "greater_equal", "equal", "not_equal"}
)
_LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})


def promoted(values: Sequence[Any]) -> list[Any]:
    """Operands as arrays of the type that `number_types` gives them together; floats are float64.

    What is no number or array is returned as it is.
    """
    arrays = {i: value for i, value in enumerate(values) if isinstance(value, np.ndarray)}
    python = {i: value for i, value in enumerate(values) if isinstance(value, (bool, int, float))}
    if len(arrays) + len(python) < len(values):
        return list(values)
    types = [_type_name(value) for value in arrays.values()]
    types += ["bool" for value in python.values() if isinstance(value, bool)]
    weak = [
        Kind.FLOAT if isinstance(value, float) else Kind.INT
        for value in python.values()
        if not isinstance(value, bool)
    ]
    name = result_type(types, weak)
    if kind_of(name) is Kind.FLOAT:
        return [np.asarray(value, np.float64) for value in values]
    if name != "bool":
        values = [wrapped(v, name) if isinstance(v, int) else v for v in values]
    return [np.asarray(value).astype(name) for value in values]


def _type_name(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind == "f":
        return "float32"
    if array.dtype.kind == "b":
        return "bool"
    return array.dtype.name if array.dtype.name in LIMITS else "int32"


class Array(np.ndarray[Any, np.dtype[Any]]):
    """Values of the NumPy reading: float64, bool, or ints of a kernel's types, which wrap alike."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        plain = [_as_plain(value) for value in args]
        if ufunc is np.subtract and any(map(_is_bool, plain)):
            raise build.refused_difference(*map(type_of, plain))
        if method == "__call__" and ufunc.__name__ in _OF_NUMBERS:
            plain = promoted(plain)
        elif method == "__call__" and ufunc.__name__ not in _LOGICAL:
            plain = [_as_floats(value) for value in plain]  # NumPy has float16 for small ints
        if "out" in kwargs:  # NumPy's own functions, such as mean, write into their temporaries
            kwargs["out"] = tuple(np.asarray(value) for value in kwargs["out"])
        if ufunc is np.power and not build.is_product(_literal(args[1])):
            plain[0] = np.asarray(plain[0], np.float64)  # NumPy has no int ** -1
        with np.errstate(all="ignore"):  # kernels do not warn of x / 0 either
            return self._keep(getattr(ufunc, method)(*plain, **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.where and len(args) == 3:
            args = (np.asarray(args[0]), *promoted([_as_plain(value) for value in args[1:]]))
            return self._keep(np.where(*args))
        return self._keep(super().__array_function__(func, types, args, kwargs))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        refuse_in_place(f"torch.{func.__name__}", func.__name__, kwargs or {})
        name = func.__name__.strip("_")
        found = FOUND_TENSOR.get()
        if name == "getitem" and found is not None:
            return found(args[0])[args[1]]
        plain = [_plain(value, cls) if hasattr(value, "detach") else value for value in args]
        if name in ("pow", "rpow"):  # a constant exponent decides whether powers are products
            plain = [_literal(value) if hasattr(value, "detach") else x
                     for value, x in zip(args, plain, strict=True)]  # fmt: skip
        if name == "getitem":
            return clamped(plain[0], plain[1])
        if name not in NAMED:
            raise build.refuse(f"torch.{name}", remedy_for(name))
        return cls._keep(NAMED[name](*plain, **(kwargs or {})))

    def __getattr__(self, name: str) -> Any:
        if name in NAMED:
            return functools.partial(NAMED[name], self)
        raise AttributeError(name)

    def __eq__(self, other: Any) -> Any:
        # A torch number would compare in torch, and give a tensor, of whose numbers none wraps.
        return super().__eq__(_plain(other, type(self)) if hasattr(other, "detach") else other)

    __hash__ = None  # as that of all arrays

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_two("max", *args) if _is_value(args) else super().max(*args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_two("min", *args) if _is_value(args) else super().min(*args, **kwargs)

    def _of_two(self, name: str, other: Any) -> Any:
        other = _plain(other, type(self)) if hasattr(other, "detach") else other
        return self._keep(NAMED[name](self, other))

    def __floor__(self) -> Any:
        return self._keep(np.floor(self))

    def __ceil__(self) -> Any:
        return self._keep(np.ceil(self))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise build.refuse("assigning to elements", "Use where(condition, a, b).")

    def __len__(self) -> NoReturn:  # also keeps torch from taking an index for a list of indices
        raise build.refuse("the length of a value", NO_PARTS)

    @classmethod
    def _keep(cls, value: Any) -> Any:
        if not isinstance(value, (np.ndarray, np.generic)):
            return value
        plain = np.asarray(value)
        if plain.dtype.kind in "iu" and plain.dtype.name not in LIMITS:
            plain = plain.astype(np.int32)
        return plain.view(cls)


def _plain(tensor: Any, cls: type[Array]) -> Any:
    """A torch tensor as an array, or the number that a trace reads it as."""
    found = to_numpy(tensor) if tensor.dim() else _number(tensor)
    return found.view(cls) if isinstance(found, np.ndarray) else found


def _number(tensor: Any) -> Any:
    """torch's own ints have a type, as in a trace; other numbers are Python's."""
    number = tensor.item()
    is_typed = type(number) is int
    return np.asarray(number).astype(type_of_tensor(tensor)) if is_typed else number


def _as_plain(value: Any) -> Any:
    if isinstance(value, Array):
        return np.asarray(value)
    is_tensor = hasattr(type(value), "detach") and value.ndim == 0
    return _number(value) if is_tensor else _literal(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_


def _as_floats(value: Any) -> Any:
    is_whole = isinstance(value, np.ndarray) and value.dtype.kind in "biu"
    return value.astype(np.float64) if is_whole else value


def _is_value(args: Sequence[Any]) -> bool:
    """Whether a method's arguments are one value, and not a dimension, as NumPy takes them."""
    return len(args) == 1 and hasattr(args[0], "dtype")


def _literal(value: Any) -> Any:
    """A NumPy number as the Python number that a trace reads it as; others as they are."""
    is_number = not isinstance(value, Array) and hasattr(type(value), "ndim") and value.ndim == 0
    return value.item() if is_number else value


class Array32(Array):
    """The same in single precision: every float result is rounded to float32, also of ints."""

    @classmethod
    def _keep(cls, value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype == np.float64:
            value = np.asarray(value).astype(np.float32)
        return super()._keep(value)


class _TorchTyped:
    """Arrays that say of their types what torch would, for functions written for torch."""

    @property
    def dtype(self) -> Any:
        return foreign_dtype(type_of(self))

    @property
    def device(self) -> Any:
        return "cpu"


class TorchArray(_TorchTyped, Array):
    """What FlexAttention's functions get in the NumPy reading."""


class TorchArray32(_TorchTyped, Array32):
    """The same in single precision."""


def for_torch(value: Any) -> Any:
    """A value as a function written for torch takes it; what is no array of ours as it is."""
    if not isinstance(value, Array):
        return value
    return value.view(TorchArray32 if isinstance(value, Array32) else TorchArray)


# `x += y` makes a new value, as it does for symbols; the caller's array stays what it was.
for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
):
    setattr(Array, f"__i{_name}__", getattr(np.ndarray, f"__{_name}__"))


def clamped(array: Any, index: Any) -> Any:
    """`array[index]` with every index held inside its dimension, as kernels load.

    Of a tensor without elements, zeros: no kernel reads it, for nobody has a key or a row then.
    """
    if 0 in array.shape:
        array = np.zeros_like(array, shape=[max(1, size) for size in array.shape])
    indices = index if isinstance(index, tuple) else (index,)
    held = (
        np.clip(np.asarray(i, np.int64), 0, size - 1)
        for i, size in zip(indices, array.shape, strict=False)
    )
    return array[tuple(held)]
