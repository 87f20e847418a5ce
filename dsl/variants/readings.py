"""Readings, which give a variant's fields values: symbols for tracing, NumPy for the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types.axes import axes_text, check_axes
from warploom.dsl.types.ir import Kind, Node, var
from warploom.dsl.types.number_types import SMALL
from warploom.dsl.types.spec import CustomFunction, OutputField, Record, ScalarField, TensorField
from warploom.dsl.values.arrays import Array, clamped, to_numpy
from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.symbols import Symbol, Value, as_node, wrap
from warploom.dsl.variants.fields import EXACT_AXES, as_scalar, misuse
from warploom.dsl.variants.outputs import ArrayRecorder, Recorded, SymbolicRecorder
from warploom.errors import MissingInput, WrongDType, WrongShape


class _FieldTensor(ReadInParts):
    """A tensor field inside a functor."""

    def __init__(self, variant: str, field: TensorField) -> None:
        self._variant = variant
        self._field = field

    def described(self) -> str:
        return f"tensor field {self._field.name!r}"

    def remedy(self) -> str:
        return (
            f"A functor reads one element of it, such as {_indexed(self._field)}; sizes are known "
            "only at run time, pass them as Scalar fields."
        )


class SymbolicTensor(_FieldTensor):
    """A tensor field during tracing: indexing it gives a load."""

    def __getitem__(self, index: Value) -> Symbol:
        indices = _indices(self._variant, self._field, index)
        nodes = tuple(map(self._node, range(len(indices)), indices, self._field.axes))
        field = self._field
        loaded = build.make("load", field.dtype.kind, *nodes, attr=field.name)
        return wrap(_as_captured(loaded, field))

    def _node(self, dim: int, index: Value, axis: str | None) -> Node:
        found = as_node(index)
        if found.kind is not Kind.INT:
            raise self._misuse(f"an index is {found.kind.value}, not an int; use to_int(x)")
        if axis in EXACT_AXES and found is not var(axis):
            given = f"at.{found.attr}" if found.op == "var" else "another value"
            raise self._misuse(
                f"dimension {dim} has the axis {axis!r} and is indexed by {given}",
                f"Index it by at.{axis} (are the indices swapped?), or declare None.",
            )
        return found

    def _misuse(self, reason: str, remedy: str = "") -> Exception:
        return misuse(self._variant, self._field.name, reason, remedy)


def _as_captured(read: Node, field: ScalarField | TensorField) -> Node:
    """The node, in torch's type for captured small ints; declared ones compute in 32 bits."""
    is_small = field.captured and field.dtype.name in SMALL
    return build.read_as(read, field.dtype.name) if is_small else read


class TraceReading:
    """Fields as symbols; it records which fields were read."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.hook = "a functor"
        self.scalars: dict[str, ScalarField] = {}
        self.tensors: dict[str, TensorField] = {}
        self.records: dict[str, Record] = {}
        self.functions: dict[str, CustomFunction] = {}
        self.rotated: dict[str, int] = {}  # hook -> lanes of its widest rotation

    def scalar(self, field: ScalarField) -> Symbol:
        self.scalars[field.name] = field
        read = build.make("scalar", field.dtype.kind, attr=field.name)
        return wrap(_as_captured(read, field))

    def tensor(self, field: TensorField) -> SymbolicTensor:
        self.tensors[field.name] = field
        return SymbolicTensor(self.variant, field)

    def output(self, field: OutputField) -> SymbolicRecorder:
        self.tensors[field.name] = field
        return SymbolicRecorder(self.variant, field, self.hook, self.records)


class ArrayTensor(_FieldTensor):
    """A tensor field in the NumPy reading; indices are clamped, as in the kernel."""

    def __init__(self, variant: str, field: TensorField, values: Array) -> None:
        super().__init__(variant, field)
        self._values = values

    def __getitem__(self, index: Value) -> Value:
        return clamped(self._values, _indices(self._variant, self._field, index))


class NumpyReading:
    """Fields as numbers and arrays of one class.

    Args:
        variant: the variant's name, for messages.
        values: input name -> number, NumPy array or torch tensor.
        array_class: `Array`, or `Array32` for single precision.
        sizes: known lengths of axes: exact for heads and lanes, a minimum for others. The lanes are
            those of the hook's vector.
    """

    def __init__(
        self,
        variant: str,
        values: Mapping[str, Any],
        array_class: type[Array] = Array,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.variant = variant
        self.hook = "a functor"
        self._values = values
        self._array_class = array_class
        self.sizes = dict(sizes or {})
        self._tensors: dict[str, ArrayTensor] = {}
        self._recorded: dict[str, Recorded] = {}

    def scalar(self, field: ScalarField) -> Value:
        value = self._values.get(field.name, field.default)
        if value is None:
            raise self._missing(field.name, f"a {field.dtype.name} number")
        found = to_numpy(value)
        if found.size != 1:
            raise WrongShape.of_scalar(field.name, found.shape, field.dtype.name)
        number = as_scalar(field.dtype, found.item(), field.name, self.variant)
        field.refuse(number)
        return self._read(number, field)

    def tensor(self, field: TensorField) -> ArrayTensor:
        if field.name not in self._tensors:
            value = self._values.get(field.name)
            if value is None:
                shape = axes_text(field, {})
                raise self._missing(field.name, f"{field.dtype.name} tensor {shape}")
            values = self._read(value, field)
            if values.ndim != len(field.axes):
                wanted = axes_text(field, self.sizes)
                raise WrongShape(name=field.name, got=values.shape, expected=wanted)
            check_axes(field, values.shape, self.sizes)
            self._tensors[field.name] = ArrayTensor(self.variant, field, values)
        return self._tensors[field.name]

    def output(self, field: OutputField) -> ArrayRecorder:
        target = self._values.get(field.name)
        if target is None:
            shape = axes_text(field, {})
            raise self._missing(field.name, f"a {field.dtype.name} tensor {shape} to write")
        got = str(getattr(target, "dtype", type(target).__name__)).rpartition(".")[2]
        if got != field.dtype.name:
            remedy = f"Allocate it with dtype {field.dtype.name}, or declare the Output with {got}."
            raise WrongDType(name=field.name, got=got, expected=field.dtype.name, remedy=remedy)
        if len(target.shape) != len(field.axes):
            wanted = axes_text(field, self.sizes)
            raise WrongShape(name=field.name, got=tuple(target.shape), expected=wanted)
        check_axes(field, tuple(target.shape), self.sizes)
        return ArrayRecorder(self.variant, field, self.hook, target, self._recorded)

    def store_recorded(self, visible: np.ndarray[Any, Any]) -> None:
        """Write the values that functors have recorded since the last call, where visible.

        Args:
            visible: bool [rows, keys].
        """
        for recorded in self._recorded.values():
            recorded.store(visible)
        self._recorded.clear()

    def _read(self, value: Any, field: ScalarField | TensorField) -> Array:
        values = to_numpy(value, field.dtype.kind)
        if field.captured and field.dtype.name in SMALL:
            values = values.astype(field.dtype.name)
        return self.array(values)

    def array(self, value: np.ndarray[Any, Any]) -> Array:
        """The value in this reading's precision."""
        return self._array_class._keep(value)  # type: ignore[no-any-return]

    def _missing(self, name: str, expected: str) -> MissingInput:
        return MissingInput.among_inputs(self.variant, name, expected)


def _indexed(field: TensorField) -> str:
    """The expression by which a functor reads one element, for messages."""
    each = (f"at.{axis}" if axis else "index" for axis in field.axes)
    return f"self.{field.name}[{', '.join(each)}]"


def _indices(variant: str, field: TensorField, index: Value) -> tuple[Value, ...]:
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) != len(field.axes):
        expected = ", ".join(axis or "any" for axis in field.axes)
        reason = f"got {len(indices)} indices; it has {len(field.axes)} dimensions ({expected})"
        raise misuse(variant, field.name, reason, f"Write {_indexed(field)}.")
    for each in indices:
        if isinstance(each, slice) or each is None or each is Ellipsis:
            raise misuse(variant, field.name, "it is indexed by ints, not by slices")
        if isinstance(each, int) and each < 0:
            raise misuse(variant, field.name, f"index {each} is negative")
    return indices
