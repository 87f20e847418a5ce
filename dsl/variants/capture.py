"""Finds tensors that a plain function captures, and replaces them by proxies that load from fields.

A function is rebuilt with proxies in its closure, globals and defaults. Tensors that it reaches in
another way (such as an attribute of a module) are found when a symbol indexes them.
"""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types import location
from warploom.dsl.types.dtypes import BY_NAME, DType, dtype
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import ScalarField, TensorField
from warploom.dsl.values import symbols
from warploom.dsl.values.stand_ins import has_memory, is_followed, unwatched
from warploom.dsl.values.symbols import Symbol, Value
from warploom.dsl.variants.captured import CapturedTensor
from warploom.dsl.variants.code_names import names
from warploom.dsl.variants.fields import RESERVED, Field, Reading, Scalar, Tensor
from warploom.errors import ArgumentError, GlobalMutated

Replace = Callable[[str, Any], Any]
# Attributes of a variant: its `Captures`, and the functions whose tensors they replace.
CAPTURES, FUNCTIONS = "_captures", "_functions"


class Captures:
    """The tensors captured by a pair of functions, as fields."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.fields: dict[str, Field] = {}
        self._names: dict[object, str] = {}
        self._tensors: dict[str, Any] = {}  # keeps the addresses in `_names` valid, too
        self.alike: dict[str, Any] = {}  # tensors that kernels read without conversion
        self._copies: dict[str, Any] = {}  # converted tensors, whose addresses graphs may read

    def known_name(self, tensor: Any) -> str | None:
        """The field of a tensor, or None if it was not captured yet."""
        return self._names.get(_identity(tensor))

    def values(self) -> dict[str, Any]:
        """Current values of the tensors, in the types of their fields."""
        return {
            name: field.accept(self._value(name, field.dtype))
            for name, field in self.fields.items()
        }

    def _value(self, name: str, stored: DType) -> Any:
        """The tensor in the type of its field; a converted copy is kept, and updated in place.

        Each call updates it, since torch does not count writes through `.data` and `.numpy()`.
        """
        tensor = self._tensors[name]
        if is_followed(tensor) or getattr(tensor, "requires_grad", False):
            return _converted(tensor, stored)
        with unwatched():
            kept = self._copies.get(name)
            if kept is not None and kept.shape == tensor.shape:
                kept[...] = tensor
                return kept
            found = _converted(tensor, stored)
            if found is not tensor and writes(tensor) is not None:
                self._copies[name] = found
            return found

    def name_of(self, tensor: Any, wish: str) -> str:
        """The name of a tensor's field; a tensor that is new gets a new field."""
        key = _identity(tensor)
        if key not in self._names:
            _refuse_odd(tensor, wish)
            name = self._free_name(wish)
            stored = _stored_type(tensor, name)
            axes = getattr(tensor, "field_axes", (None,) * tensor.ndim)
            field: Field = CapturedField(stored, axes) if axes else CapturedNumber(stored)
            field.name, field.owner = name, self.owner
            self.fields[name] = field
            self._tensors[name] = tensor
            if str(tensor.dtype).removeprefix("torch.") == stored.name:
                self.alike[name] = tensor
            self._names[key] = name
        return self._names[key]

    def doubles(self) -> set[str]:
        """Names of float64 tensors, whose values are rounded."""
        return {name for name, x in self._tensors.items() if str(x.dtype).endswith("float64")}

    def shares(self, name: str, other: Captures) -> bool:
        """True if the field of this name is the same tensor here and in `other`.

        Equal values are not enough: tensors are read again later, and may then differ.
        """
        if name not in self._tensors or name not in other._tensors:
            return False
        return _identity(self._tensors[name]) == _identity(other._tensors[name])

    def read(self, tensor: Any, wish: str, reading: Reading) -> Value:
        """The proxy of a captured tensor under a reading."""
        field = self.fields[self.name_of(tensor, wish)]
        if isinstance(field, Scalar):
            return field.read(reading)
        made = CapturedTensor(field.name, tensor, field.read(reading))
        made.reread = lambda view: self.read(view, wish, reading)
        return made

    def _free_name(self, wish: str) -> str:
        base = re.sub(r"\W", "", wish).strip("_") or "captured"
        base = f"{base}_tensor" if base in RESERVED else base
        names = (base, *(f"{base}{i}" for i in range(2, len(self.fields) + 3)))
        return next(name for name in names if name not in self.fields)


class CapturedField(Tensor):
    """A field that no class declares."""

    def spec(self) -> TensorField:
        return replace(super().spec(), captured=True)


class CapturedNumber(Scalar):
    """A field of one number that no class declares."""

    def spec(self) -> ScalarField:
        return replace(super().spec(), captured=True)


def is_tensor(value: object) -> bool:
    """True for torch tensors and NumPy arrays, including those without dimensions."""
    if isinstance(value, (type, dict, Symbol, np.generic, CapturedTensor)):
        return False  # a dictionary may answer for any attribute with an error
    if getattr(value, "is_nested", False) is True:  # some nested tensors have no shape
        return True
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


@contextmanager
def indexing(captures: Captures, reading: Reading) -> Iterator[None]:
    """Within the context, capture torch tensors that are indexed by a symbol."""
    token = symbols.FOUND_TENSOR.set(lambda found: captures.read(found, "captured", reading))
    try:
        yield
    finally:
        symbols.FOUND_TENSOR.reset(token)


def rebuild(function: Callable[..., Any], replace: Replace) -> Callable[..., Any]:
    """A copy of `function` in which `replace(name, value)` has replaced captured tensors.

    Helpers that it calls, functions in captured tuples and lists, methods and partials are
    followed. A function without anything to replace is returned as it is.
    """
    rebuilt: Callable[..., Any] = _Rebuilder(replace).value("", function)
    return rebuilt


class _Rebuilder:
    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        self._done: dict[FunctionType, FunctionType] = {}

    def value(self, name: str, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.value(name, value.__func__), value.__self__)
        if isinstance(value, functools.partial):
            args = [self.value(name, arg) for arg in value.args]
            kwargs = {key: self.value(key, arg) for key, arg in value.keywords.items()}
            return functools.partial(self.value(name, value.func), *args, **kwargs)
        if type(value) in (tuple, list):
            items = [self.value(name, item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return self._replace(name, value) if is_tensor(value) else value

    def _function(self, function: FunctionType) -> FunctionType:
        if function in self._done:
            return self._done[function]
        code = function.__code__
        self._done[function] = function  # ends the recursion at its own name in its globals
        found = {
            name: function.__globals__[name] for name in names(code) if _global(function, name)
        }
        globals_ = {name: self.value(name, value) for name, value in found.items()}
        free = tuple(code.co_freevars)
        cells = tuple(map(self._cell, free, function.__closure__ or ()))
        defaults = self.value("default", function.__defaults__)
        changed = (
            any(globals_[name] is not found[name] for name in found)
            or any(
                new is not old for new, old in zip(cells, function.__closure__ or (), strict=True)
            )
            or defaults is not function.__defaults__
        )
        if not changed:
            return function
        _refuse_stores(function)  # they would change the copy only, unnoticed
        made = FunctionType(
            code, {**function.__globals__, **globals_}, function.__name__, defaults, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        self._done[function] = made
        return made

    def _cell(self, name: str, cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # not bound yet
            return cell
        value = self.value(name, held)
        return cell if value is held else CellType(value)


def _refuse_stores(function: FunctionType) -> None:
    code = function.__code__
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = location.line_of(step) or line
        outer = step.opname == "STORE_GLOBAL" or (
            step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        )
        if outer:
            raise GlobalMutated(
                hook="a statement",
                variant=function.__name__,
                name=step.argval,
                source=location.at_line(code, line),
            )


def _global(function: FunctionType, name: str) -> bool:
    value = function.__globals__.get(name)
    if isinstance(value, FunctionType):
        return not (value.__module__ or "").startswith(("warploom.", "torch.", "numpy."))
    return value is not None


def _identity(tensor: Any) -> object:
    """A key that is equal for two views of the same memory; each indexing in torch makes a view."""
    if type(tensor) is np.ndarray:
        return tensor.ctypes.data, tensor.shape, tensor.strides, tensor.dtype
    if not hasattr(tensor, "data_ptr") or not has_memory(tensor):
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _refuse_odd(tensor: Any, name: str) -> None:
    """Raise ArgumentError for a tensor that is no plain table of numbers."""
    if isinstance(tensor, np.ma.MaskedArray):
        reason = "is a masked array; fill it, with .filled(value)"
    elif getattr(tensor, "is_nested", False):
        reason = "is a nested tensor; pad it, with .to_padded_tensor(0)"
    elif "strided" not in str(getattr(tensor, "layout", "strided")):
        reason = f"is a tensor of layout {tensor.layout}; use .to_dense()"
    else:
        return
    raise ArgumentError(name=name, reason=reason)


def _stored_type(tensor: Any, shown: str) -> DType:
    try:
        return dtype(tensor.dtype)
    except KeyError:  # the values are converted
        name = str(tensor.dtype).rpartition(".")[2]
        if not name.startswith(("float", "uint16", "uint32")):
            remedy = "Capture bools, ints, or float32 numbers made of it."
            raise build.refuse(f"captured tensor {shown!r} of {tensor.dtype}", remedy) from None
        return BY_NAME["float32" if name.startswith("float") else "int64"]


def writes(value: Any) -> int | None:
    """Number of writes to a tensor that torch has counted; None for other objects."""
    if isinstance(value, Symbol):
        return None
    try:
        count = value._version
    except (AttributeError, RuntimeError):  # tensors of inference mode have no count
        return None
    return count if isinstance(count, int) else None


def _converted(tensor: Any, stored: DType) -> Any:
    try:
        dtype(tensor.dtype)
        return tensor
    except KeyError:
        if hasattr(tensor, "detach"):
            return tensor.float() if stored.kind is Kind.FLOAT else tensor.long()
        return tensor.astype(stored.name)
