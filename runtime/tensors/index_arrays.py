"""Where the index arrays of a plan lie, so that a native planner can read them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any, NamedTuple

import numpy as np
import torch

from warploom.dsl.values.stand_ins import stands_in
from warploom.runtime.tensors import shortcuts
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.tensors import byte_span, host_int32

_Tensor, _Array = torch.Tensor, np.ndarray
_TORCH_INT32, _INT32 = torch.int32, np.dtype(np.int32)


class IndexArrays(NamedTuple):
    """Index arrays that a native planner can read.

    Attributes:
        kept: what keeps their memory.
        addresses: of their first entries; 0 if the planner does not read them.
        counts: how many entries they have.
    """

    kept: tuple[Any, ...]
    addresses: Sequence[int]
    counts: Sequence[int]


class IndexReader:
    """Finds the index arrays of one planner's batches.

    If all are tensors, those of the next batch mostly are so, too: one comparison then tells that
    none has to be looked at alone.
    """

    def __init__(self, *names: str) -> None:
        """Take the names of the arrays, for messages."""
        self._names = names
        self._same: shortcuts.Same = _never

    def __call__(self, *given: Any) -> IndexArrays:
        """The arrays on the host, in the order of their names; page numbers may stay on the device.

        Raises:
            WrongDType, WrongShape, ArgumentError: see `host_int32`.
        """
        if not self._same(*given):
            if not all(map(_is_plain, given)):
                return IndexArrays(*zip(*map(_locate, given, self._names), strict=True))
            self._same = shortcuts.like(*given, any_size=True)
        addresses, counts = [], []
        for array in given:  # one loop, which costs less than two comprehensions
            addresses.append(array.data_ptr())
            counts.append(array.numel())
        if not all(addresses):
            for array, name in zip(given, self._names, strict=True):
                refuse_freed(array, name, byte_span(array))
        return IndexArrays(given, addresses, counts)


def _never(*_: Any) -> bool:
    return False


def _is_plain(value: Any) -> bool:
    """True for an int32 tensor on the host, of which any number of entries would be contiguous."""
    is_tensor = isinstance(value, _Tensor) and value.is_cpu and is_index_tensor(value)
    return is_tensor and value.stride(0) == 1


def _locate(value: Any, name: str) -> tuple[Any, int, int]:
    """What keeps an array, its address and its length."""
    if isinstance(value, _Array):
        if value.dtype is _INT32 and value.ndim == 1 and value.flags.carray and len(value):
            # ctypes finds the address in a third of NumPy's time
            return value, addressof(c_char.from_buffer(value.data)), len(value)
    elif isinstance(value, _Tensor) and is_index_tensor(value):
        if value.is_cpu:
            refuse_freed(value, name, byte_span(value))
            return value, value.data_ptr(), value.numel()
        if name == "kv_indices":
            return value, 0, value.numel()
    array = host_int32(value, name)  # the array itself if it is one of int32
    return array, array.ctypes.data, len(array)


def is_index_tensor(value: torch.Tensor) -> bool:
    """True for what a native planner reads as it is."""
    if stands_in(value):
        return False
    return value.dtype is _TORCH_INT32 and value.dim() == 1 and value.is_contiguous()
