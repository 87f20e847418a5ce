"""NumPy arrays as functors see them: torch's function names too, and nothing changes in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

import warploom.dsl.foreign  # noqa: F401  (fills NAMED)
from warploom.dsl import build
from warploom.dsl.ir import Kind
from warploom.dsl.symbols import FOUND_TENSOR, NAMED, refuse_in_place, remedy_for

_NUMPY = {Kind.BOOL: np.bool_, Kind.INT: np.int64, Kind.FLOAT: np.float64}


def to_numpy(value: Any, kind: Kind | None = None) -> np.ndarray[Any, Any]:
    """A torch tensor, array or number as bool, int64 or float64 (`kind`; None: the value's own)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        floating = value.is_floating_point()  # bfloat16 has no NumPy twin
        value = (value.double() if floating else value).numpy()
    array = np.asarray(value)
    if kind is None:
        kind = {"b": Kind.BOOL, "i": Kind.INT, "u": Kind.INT}.get(array.dtype.kind, Kind.FLOAT)
    return array.astype(_NUMPY[kind])


class Array(np.ndarray[Any, np.dtype[Any]]):
    """Float64, int64 or bool values of the NumPy reading; ints wrap at 32 bits, as in kernels."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, Array) else value for value in args]
        if "out" in kwargs:  # NumPy's own functions, such as mean, write into their temporaries
            kwargs["out"] = tuple(np.asarray(value) for value in kwargs["out"])
        if ufunc is np.power and not build.is_product(_literal(args[1])):
            plain[0] = np.asarray(plain[0], np.float64)  # NumPy has no int ** -1
        with np.errstate(all="ignore"):  # kernels do not warn of x / 0 either
            return self._keep(getattr(ufunc, method)(*plain, **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
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

    def __floor__(self) -> Any:
        return self._keep(np.floor(self))

    def __ceil__(self) -> Any:
        return self._keep(np.ceil(self))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise build.refuse("assigning to elements", "Use where(condition, a, b).")

    def __len__(self) -> NoReturn:  # also keeps torch from taking an index for a list of indices
        raise build.refuse("the length of a value", "Functors see one element or vector at a time.")

    @classmethod
    def _keep(cls, value: Any) -> Any:
        if not isinstance(value, (np.ndarray, np.generic)):
            return value
        plain = np.asarray(value)
        if plain.dtype.kind in "iu":
            plain = plain.astype(np.int32).astype(np.int64)
        return plain.view(cls)


def _plain(tensor: Any, cls: type[Array]) -> Any:
    """A torch tensor as an array, or the Python number that a trace reads it as."""
    return to_numpy(tensor).view(cls) if tensor.dim() else tensor.item()


def _literal(value: Any) -> Any:
    """A NumPy number as the Python number that a trace reads it as; others as they are."""
    is_number = not isinstance(value, Array) and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


class Array32(Array):
    """The same in single precision: every float result is rounded to float32, also of ints."""

    @classmethod
    def _keep(cls, value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype == np.float64:
            value = np.asarray(value).astype(np.float32)
        return super()._keep(value)


# `x += y` makes a new value, as it does for symbols; the caller's array stays what it was.
for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
):
    setattr(Array, f"__i{_name}__", getattr(np.ndarray, f"__{_name}__"))


def clamped(array: Any, index: Any) -> Any:
    """`array[index]` with every index held inside its dimension, as kernels load."""
    indices = index if isinstance(index, tuple) else (index,)
    held = (
        np.clip(np.asarray(i), 0, size - 1) for i, size in zip(indices, array.shape, strict=False)
    )
    return array[tuple(held)]
