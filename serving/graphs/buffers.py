"""Memory that captures read and write at addresses that stay: inputs, and between sections."""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warploom.error_base import kind_of
from warploom.errors import ArgumentError, WarploomError, WrongDevice, WrongDType, WrongShape
from warploom.graph_errors import NotStatic, WrongInputs
from warploom.runtime.declaring.declare import checked_count
from warploom.serving.graphs.pieces import Flow


@dataclass(frozen=True)
class GraphInput:
    """What a step reads of each row of a batch.

    Attributes:
        dtype: of its numbers, a torch.dtype; also made of its name, such as "int64".
        shape: of one row; () is a number.
        pad: what rows have that fill a batch up to its bucket; they must be as good as any others
            to the step, such as a token that exists. A pad beyond an embedding's rows is an
            IndexError of the step, in `warm_up` or at the first batch that is padded,
            with a note that says so.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    pad: float = 0

    def __init__(
        self, dtype: torch.dtype | str, shape: tuple[int, ...] = (), pad: float = 0
    ) -> None:
        """Declare it; raises ArgumentError for what names no type of torch."""
        for name, value in (("dtype", _torch_dtype(dtype)), ("shape", shape), ("pad", pad)):
            object.__setattr__(self, name, value)


class Inputs:
    """A buffer for each input of a pool.

    Attributes:
        buffers: by name, [most rows, *shape of a row].
    """

    def __init__(self, declared: Mapping[str, GraphInput], most: int, device: torch.device) -> None:
        """Allocate them; raises ArgumentError and WrongInputs."""
        if not isinstance(declared, Mapping):
            reason = f"is of type {type(declared).__name__}; expected {{name: GraphInput(...)}}"
            raise ArgumentError(name="inputs", reason=reason)
        if not declared:
            raise WrongInputs(reason="are none", known="at least one")
        for name, one in declared.items():
            if not isinstance(one, GraphInput):
                reason = f"is {one!r}; expected GraphInput(dtype, shape of a row)"
                raise ArgumentError(name=f"inputs[{name!r}]", reason=reason)
            if not isinstance(one.shape, (tuple, list)):
                reason = f"is {one.shape!r}; expected a tuple: () for a number, or ({one.shape!r},)"
                raise ArgumentError(name=f"inputs[{name!r}].shape", reason=reason)
            for size in one.shape:
                checked_count(f"inputs[{name!r}].shape", size)
            _check_pad(name, one)
        self._declared, self._device = dict(declared), device
        with torch.inference_mode(False):
            self.buffers = {
                name: torch.full((most, *one.shape), one.pad, dtype=one.dtype, device=device)
                for name, one in declared.items()
            }
        self._filled = 0  # rows that may hold something else than padding

    @property
    def names(self) -> list[str]:
        return list(self._declared)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.itemsize for x in self.buffers.values())

    def rows(self, given: Mapping[str, Any]) -> int:
        """Rows of a batch, all of whose tensors are checked.

        Raises:
            WrongInputs: of other names, or no rows, or not equally many.
            WrongDType, WrongDevice, WrongShape: a tensor unlike what was declared.
        """
        known = ", ".join(self._declared)
        if not isinstance(given, Mapping) or set(given) != set(self._declared):
            names = kind_of(given)
            if isinstance(given, Mapping):
                names = ", ".join(map(str, given)) or "none"
            example = f"run({{{next(iter(self._declared))!r}: ...}})"
            raise WrongInputs(reason=f"are {names}; expected such as {example}", known=known)
        counts = set()
        for name, one in self._declared.items():
            tensor = given[name]
            if not isinstance(tensor, torch.Tensor):
                reason = f"have {type(tensor).__name__} {name}, which is no tensor"
                raise WrongInputs(reason=reason, known=known)
            if tensor.dtype != one.dtype:
                raise WrongDType(name=name, got=tensor.dtype, expected=one.dtype)
            if tensor.device != self._device:
                raise WrongDevice(name=name, got=str(tensor.device), expected=str(self._device))
            if tensor.ndim == 0 or tuple(tensor.shape[1:]) != tuple(one.shape):
                expected = f"[rows, {', '.join(map(str, one.shape))}]" if one.shape else "[rows]"
                raise WrongShape(name=name, got=list(tensor.shape), expected=expected)
            counts.add(len(tensor))
        if len(counts) > 1 or 0 in counts:
            reason = f"have {' and '.join(map(str, sorted(counts)))} rows; expected as many in each"
            raise WrongInputs(reason=f"{reason}, and at least 1", known=known)
        return counts.pop()

    def fill(self, given: Mapping[str, torch.Tensor], rows: int) -> None:
        """Write a batch, and padding where the one before reached further."""
        copy([(self.buffers[name][:rows], given[name]) for name in self._declared])
        if self._filled > rows:
            for name, one in self._declared.items():
                self.buffers[name][rows : self._filled].fill_(one.pad)
        self._filled = rows

    def note_padding(self, error: Exception, call: str, rows: int) -> None:
        """Say in an error of the step, from Python 3.11 on, how many of its rows are padding.

        Args:
            error: of the step.
            call: of the pool.
            rows: of padding.
        """
        add_note = getattr(error, "add_note", None)
        if rows == 0 or isinstance(error, WarploomError) or add_note is None:
            return
        pads = ", ".join(f"{name}={one.pad!r}" for name, one in self._declared.items())
        add_note(
            f"GraphPool.{call}() called the step with {rows} rows of padding, {pads}: pad of each "
            "GraphInput must be as good to the step as any other, such as a token that exists."
        )

    def clear(self) -> None:
        """Leave padding alone."""
        for name, one in self._declared.items():
            self.buffers[name].fill_(one.pad)
        self._filled = 0

    def first(self, rows: int) -> dict[str, torch.Tensor]:
        """So many rows of each buffer."""
        return {name: buffer[:rows] for name, buffer in self.buffers.items()}


class SectionBuffers:
    """Buffers for what a section gives the next, shared by all captures.

    What is read and what is written differ by `side`: no section writes what it still reads.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._most, self._device = most, device
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.itemsize for x in self._buffers.values())

    def write(self, side: str, flow: Flow, rows: int) -> Flow:
        """Copy to the buffers of a side; returns these."""
        targets = tuple(self._buffer(side, i, tensor)[:rows] for i, tensor in enumerate(flow))
        copy(list(zip(targets, flow, strict=True)))
        return targets

    def _buffer(self, side: str, place: int, like: torch.Tensor) -> torch.Tensor:
        key = (side, place, like.dtype, *like.shape[1:])
        if key not in self._buffers:
            shape = (self._most, *like.shape[1:])
            with torch.inference_mode(False):
                self._buffers[key] = torch.zeros(shape, dtype=like.dtype, device=self._device)
        return self._buffers[key]


def _torch_dtype(given: object) -> torch.dtype:
    found = getattr(torch, str(given).removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    reason = f"is {given!r}; expected a torch.dtype or its name, such as 'int64'"
    raise ArgumentError(name="GraphInput.dtype", reason=reason)


def _check_pad(name: str, one: GraphInput) -> None:
    """Raise ArgumentError for padding that is another number in a buffer, but for rounding."""
    reason = f"has pad={one.pad!r}, which {one.dtype} cannot hold"
    try:
        kept = torch.full((), one.pad, dtype=one.dtype).item()
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(name=f"inputs[{name!r}]", reason=reason) from error
    rounds = one.dtype.is_floating_point or one.dtype.is_complex
    is_rounded = rounds and isfinite(one.pad) and isfinite(kept)
    is_nan = one.pad != one.pad and kept != kept
    if not (kept == one.pad or is_rounded or is_nan):
        raise ArgumentError(name=f"inputs[{name!r}]", reason=reason)


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second to its first, by one launch where torch can."""
    if pairs:
        targets, sources = ([pair[i] for pair in pairs] for i in (0, 1))
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def as_flow(result: Any, name: str, rows: int, device: torch.device) -> Flow:
    """What a piece returned, as a tuple.

    Raises:
        NotStatic: something that is no tensor, or on another device, or without the batch's rows.
    """
    flow = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    where: dict[str, Any] = {"piece": name, "device": device, "rows": rows}
    if not flow:
        raise NotStatic(what="nothing", **where)
    for tensor in flow:
        if not isinstance(tensor, torch.Tensor):
            raise NotStatic(what=kind_of(tensor), **where)
        if tensor.device != device:
            raise NotStatic(what=f"a tensor on {tensor.device}", **where)
        if tensor.ndim == 0 or len(tensor) != rows:
            remedy = (
                "A shape that depends on values, or on something else than the rows, must not "
                "leave the step: mask the rows instead."
            )
            what = f"a tensor of shape {list(tensor.shape)}"
            raise NotStatic(what=what, remedy=remedy, **where)
    return flow
