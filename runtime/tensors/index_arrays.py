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
_address, _count = _Tensor.data_ptr, _Tensor.numel  # as functions, which `map` calls at once
_STAYING = "kv_indices"  # page numbers, which planners copy and do not read
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

    @property
    def staying(self) -> Any:
        """Page numbers that planners do not read, since they lie on a device; None if they do."""
        return None if self.addresses[-1] else self.kept[-1]


class IndexReader:
    """Finds the index arrays of one planner's batches.

    If all are tensors, those of the next batch mostly are so, too: one comparison then tells that
    none has to be looked at alone.
    """

    def __init__(self, *names: str) -> None:
        """Take the names of the arrays, for messages."""
        self._names = names
        self._same: shortcuts.Same = _never
        self._pages_stay = False  # of what is the same

    def __call__(self, *given: Any) -> IndexArrays:
        """The arrays on the host, in the order of their names; page numbers may stay on the device.

        Raises:
            WrongDType, WrongShape, ArgumentError: see `host_int32`.
        """
        known = self.known(*given)
        if known is None and self._learns(given):
            known = self.known(*given)
        if known is None:
            return IndexArrays(*zip(*map(_locate, given, self._names), strict=True))
        return known

    def known(self, *given: Any) -> IndexArrays | None:
        """The same of tensors like those before that have memory, or of int32 NumPy arrays.

        None where each must be looked at for itself.
        """
        if not self._same(*given):
            found = [*map(_of_numpy, given)]
            return None if None in found else IndexArrays(*zip(*found, strict=True))
        addresses, counts = [*map(_address, given)], [*map(_count, given)]
        if self._pages_stay:
            addresses[-1] = 0
        here = addresses[:-1] if self._pages_stay else addresses
        return IndexArrays(given, addresses, counts) if all(here) else None

    def _learns(self, given: tuple[Any, ...]) -> bool:
        """Take these for what others will be compared with; False if one must be looked at."""
        *first, last = given
        stays = self._names[-1] == _STAYING and isinstance(last, _Tensor) and not last.is_cpu
        if not all(map(_is_plain, first)) or not _is_plain(last, stays):
            return False
        self._same, self._pages_stay = shortcuts.like(*given, any_size=True), stays
        return True


def _never(*_: Any) -> bool:
    return False


def _is_plain(value: Any, elsewhere: bool = False) -> bool:
    """True for an int32 tensor on the host, of which any number of entries would be contiguous."""
    is_tensor = isinstance(value, _Tensor) and is_index_tensor(value)
    return is_tensor and value.is_cpu is not elsewhere and value.stride(0) == 1


def _locate(value: Any, name: str) -> tuple[Any, int, int]:
    """What keeps an array, its address and its length."""
    if found := _of_numpy(value):
        return found
    if isinstance(value, _Tensor) and is_index_tensor(value):
        if value.is_cpu:
            refuse_freed(value, name, byte_span(value))
            return value, value.data_ptr(), value.numel()
        if name == _STAYING:
            return value, 0, value.numel()
    array = host_int32(value, name)  # the array itself if it is one of int32
    return array, array.ctypes.data, len(array)


def _of_numpy(value: Any) -> tuple[Any, int, int] | None:
    """The same of an array that planners can read as it is, and that is not empty."""
    if not isinstance(value, _Array) or value.dtype is not _INT32 or value.ndim != 1:
        return None
    if not (value.flags.carray and len(value)):
        return None
    # ctypes finds the address in a third of NumPy's time
    return value, addressof(c_char.from_buffer(value.data)), len(value)


def is_index_tensor(value: torch.Tensor) -> bool:
    """True for what a native planner reads as it is."""
    if stands_in(value):
        return False
    return value.dtype is _TORCH_INT32 and value.dim() == 1 and value.is_contiguous()
