"""`Output`: a caller's tensor that functors record values in, for debugging.

A functor stays a pure function: `self.seen.record(value, at)` returns its `value`. Tracing stores
the graph of each recorded value beside the graphs of the hooks, so that code which analyses or
rewrites a hook never meets a store, and kernels store in a separate step (decision 0033).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types import location
from warploom.dsl.types.dtypes import ATTENTION_DTYPES
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import RECORDING_HOOK, OutputField, Record
from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value, as_node, foreign_dtype
from warploom.dsl.variants.fields import Reading, Tensor, explained, misuse, wrong_declaration

AXES = ("batch", "q_head", "q_idx", "q_pos", "q_row", "kv_pos")
_NAMES = tuple(found.name for found in ATTENTION_DTYPES)


class Output(Tensor):
    """A tensor given at run time that `logits_transform` records values in.

    `self.name.record(value, at)` stores the value of this query row, head and key, and returns it.
    Elements that are hidden, or in skipped tiles, keep the values that the caller filled in.

    Args:
        dtype: "float32", "float16" or "bfloat16", or a torch or NumPy dtype; values are float32 and
            rounded once.
        axes: the axis of each dimension, in any order: "q_head", "kv_pos", and axes for the row.
            These are "q_row" (over all requests; for dense tensors together with "batch"), or
            "batch" with "q_idx" (within the request) or "q_pos" (in the key sequence).

    Raises:
        WrongDeclaration: another dtype, or axes under which elements share a place.
        WrongCall: missing or unknown arguments.
    """

    _known_axes = AXES

    @explained("Output('float32', ('batch', 'q_head', 'q_idx', 'kv_pos'))")
    def __init__(self, dtype: str | Any, axes: tuple[str, ...]) -> None:
        super().__init__(dtype, axes)
        if self.dtype.name not in _NAMES:
            reason = f"{self.dtype.name} holds no logits; expected one of {', '.join(_NAMES)}"
            raise wrong_declaration("Output", "dtype", reason)
        _check_distinct(self.axes)

    def spec(self) -> OutputField:
        return OutputField(self.name, self.dtype, self.axes)

    def read(self, reading: Reading) -> Value:
        return reading.output(self.spec())


def _check_distinct(axes: tuple[str | None, ...]) -> None:
    """Refuse axes under which two elements would be written to the same place."""
    reason = None
    if len(set(axes)) < len(axes):
        reason = "an axis is there twice"
    elif missing := [axis for axis in ("q_head", "kv_pos") if axis not in axes]:
        reason = f"{' and '.join(missing)} is missing"
    elif "q_row" not in axes and not ("batch" in axes and {"q_idx", "q_pos"} & set(axes)):
        reason = "they do not tell query rows apart: add 'q_row', or 'batch' and 'q_idx'"
    if reason is not None:
        remedy = "Each row, head and key has a place of its own: ('batch', 'q_head', 'q_idx', "
        reason = f"{axes!r}: {reason}"
        raise wrong_declaration("Output", "axes", reason, f"{remedy}'kv_pos').")


class Recorder(ReadInParts):
    """An output inside a functor; subclasses implement `record` for their reading."""

    def __init__(self, variant: str, field: OutputField, hook: str) -> None:
        self._variant = variant
        self._field = field
        self._hook = hook

    def described(self) -> str:
        return f"output {self._field.name!r}"

    def remedy(self) -> str:
        return f"A functor records one value in it: {self._written()}."

    def _written(self) -> str:
        return f"logits = self.{self._field.name}.record(logits, at)"

    def record(self, value: Value, at: Position | None = None) -> Value:
        """Store the value of this element; returns the value.

        Raises:
            FieldMisuse: another functor than `logits_transform` records, it records twice, or the
                value is no number.
        """
        if self._hook != RECORDING_HOOK:
            reason = f"{self._hook} records in it, and only {RECORDING_HOOK} may"
            raise self._misuse(reason, f"There: {self._written()}.")
        if not isinstance(at, Position):
            raise self._misuse("a value is recorded without its position", f"{self.remedy()}")
        self._keep(value, at)
        return value

    def _keep(self, value: Value, at: Position) -> None:
        raise NotImplementedError

    def _misuse(self, reason: str, remedy: str = "") -> Exception:
        return misuse(self._variant, self._field.name, reason, remedy)

    def _twice(self) -> Exception:
        return self._misuse("two values are recorded in it", "Declare an Output for each.")

    def _no_number(self, got: str) -> Exception:
        remedy = "Record numbers, such as wl.where(condition, 1.0, 0.0)."
        return self._misuse(f"what is recorded in it is {got}", remedy)

    def __getitem__(self, index: object) -> NoReturn:
        raise self._misuse("it is written, not read", "Declare a Tensor for what is read.")

    def _assigned(self, *_: object) -> NoReturn:
        raise self._misuse("nothing is assigned to it by index", self.remedy())

    __setitem__ = __delitem__ = _assigned


class SymbolicRecorder(Recorder):
    """The recorder for tracing: it stores the graphs of the value and of its place."""

    def __init__(
        self, variant: str, field: OutputField, hook: str, records: dict[str, Record]
    ) -> None:
        super().__init__(variant, field, hook)
        self._records = records

    def _keep(self, value: Value, at: Position) -> None:
        found = as_node(value)
        if found.kind is Kind.BOOL:
            raise self._no_number("a truth")
        if self._field.name in self._records:
            raise self._twice()
        place = tuple(as_node(getattr(at, str(axis))) for axis in self._field.axes)
        made = location.source(location.here())
        as_float = build.to_kind(found, Kind.FLOAT)
        self._records[self._field.name] = Record(self._field, place, as_float, made)


@dataclass(frozen=True)
class Recorded:
    """Values that the NumPy reading stores later, when it knows which elements are visible."""

    target: Any
    place: tuple[Any, ...]
    values: Any

    def store(self, visible: np.ndarray[Any, Any]) -> None:
        """Write the values of visible elements whose place is inside the tensor, rounded once."""
        place = [np.broadcast_to(np.asarray(i), visible.shape) for i in self.place]
        for index, size in zip(place, self.target.shape, strict=True):
            visible = visible & (index >= 0) & (index < size)
        at = tuple(np.array(index[visible], np.int64) for index in place)
        values = np.broadcast_to(np.asarray(self.values, np.float64), visible.shape)[visible]
        with np.errstate(over="ignore"):
            if not hasattr(self.target, "detach"):
                self.target[at] = values
                return
        target = self.target.detach()
        long = {"dtype": foreign_dtype("int64"), "device": target.device}
        rows = tuple(target.new_tensor(index, **long) for index in at)
        target[rows] = target.new_tensor(values)


class ArrayRecorder(Recorder):
    """The recorder for the NumPy reading: it keeps the values until the mask is known."""

    def __init__(
        self,
        variant: str,
        field: OutputField,
        hook: str,
        target: Any,
        kept: dict[str, Recorded],
    ) -> None:
        super().__init__(variant, field, hook)
        self._target = target
        self._kept = kept

    def _keep(self, value: Value, at: Position) -> None:
        if np.asarray(value).dtype.kind not in "iuf":
            raise self._no_number(f"of type {np.asarray(value).dtype}")
        if self._field.name in self._kept:
            raise self._twice()
        place = tuple(getattr(at, str(axis)) for axis in self._field.axes)
        self._kept[self._field.name] = Recorded(self._target, place, value)
