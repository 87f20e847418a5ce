"""The planner compiled for the host: checks a batch and plans it without a Python loop."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from warploom.codegen.build import build
from warploom.codegen.hostcc import host_target
from warploom.codegen.planner_source import MEASURE, planner_source
from warploom.dsl.formats import KVFormat, Paged
from warploom.dsl.spec import TracedVariant
from warploom.errors import WarploomError
from warploom.runtime.batch import IndexArray, Measured
from warploom.runtime.formats import make_batch
from warploom.runtime.planner_params import PlannerParams
from warploom.runtime.tensors import host_int32
from warploom.scheduler.bounds import INT32_MAX, Bounds
from warploom.scheduler.layout import c_structs

STORAGE: Final = {"Dense": 0, "Ragged": 1, "Paged": 2}  # warploom::Storage
_ANY = Bounds(INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX)
_MEASURE = struct.Struct("=6i")  # warploom::Measure
_Tensor, _INT32 = torch.Tensor, torch.int32


class HostPlanner:
    """The native planner of one mask and storage.

    Attributes:
        params: its argument.
    """

    def __init__(self, variant: TracedVariant, kv_format: KVFormat, group_size: int) -> None:
        """Build and load it.

        Args:
            variant: its mask counts.
            kv_format: dense, ragged or paged.
            group_size: query heads per key/value head.

        Raises:
            NoHostCompiler, CompileError, CompileForbidden: there is none to be had.
        """
        artifact = build(planner_source(variant, c_structs(), "cpp"), host_target())
        library = ctypes.CDLL(str(Path(artifact.path).resolve()))
        self._plan = library[artifact.entry]
        self._plan.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._measure = library[MEASURE]
        self._measure.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._format = kv_format
        self._is_paged = isinstance(kv_format, Paged)
        self._storage = STORAGE[type(kv_format).__name__]
        self.params = PlannerParams(variant)
        self.params.set("storage", self._storage)  # measuring reads these three of a site
        self.params.set("page_size", kv_format.block_kv)
        self.params.set("group_size", group_size)
        self._found = ctypes.create_string_buffer(_MEASURE.size)
        self._found_at = ctypes.addressof(self._found)
        self.reserve(0)

    def measure(self, arguments: tuple[Any, ...], bounds: Bounds | None) -> Measured | None:
        """Check a batch; None if something is wrong, which `make_batch` will name.

        Args:
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len, as `plan` was given them.
            bounds: the largest batch, if declared.
        """
        is_paged, bounds = self._is_paged, bounds or _ANY
        qo, kv, indices, last = arguments
        if qo is None or kv is None or (indices is not None, last is not None) != (is_paged,) * 2:
            return None
        lengths = (
            _index_array(qo, "qo_indptr"),
            _index_array(kv, "kv_indptr"),
            _index_array(last, "last_page_len"),
            _index_array(indices, "kv_indices"),
        )
        (_, qo_at, ends), (_, kv_at, kv_ends), (_, last_at, lasts), (_, pages_at, pages) = lengths
        requests = ends - 1
        if not 0 <= requests <= min(bounds.max_requests, bounds.segments):
            return None
        if kv_ends != ends or (is_paged and lasts != requests):
            return None
        self.params.write_lengths(qo_at, kv_at, last_at, pages_at)
        blocks = min(bounds.max_blocks, pages)
        self.params.write_batch(requests, bounds.max_q_rows, bounds.max_kv_len, blocks)
        if self._measure(self.params.address, self._found_at) != 0:
            return None
        q_rows, longest_q, max_kv_len, kv_end, last_block, busy = _MEASURE.unpack(self._found)
        return Measured(
            lambda: make_batch(self._format, *arguments),
            lengths,
            requests,
            busy,
            longest_q if self._storage == STORAGE["Dense"] else q_rows,
            q_rows,
            longest_q,
            max_kv_len,
            kv_end if is_paged else 0,
            (max_kv_len, kv_end, last_block + 1)[self._storage],
        )

    def reserve(self, scratch: int) -> None:
        """Have so many bytes to plan in."""
        self._scratch = np.zeros(scratch + 16, np.uint8)
        self._scratch_at = -(-self._scratch.ctypes.data // 16) * 16

    def plan(self, outputs: tuple[int, ...]) -> None:
        """Write the plan of the batch that was measured last to these addresses, OUTPUTS.

        The site must have been written to `params`.
        """
        self.params.write_outputs(*outputs)
        if self._plan(self.params.address, self._scratch_at) != 0:
            raise RuntimeError("a batch changed while it was planned")


def host_planner(
    variant: TracedVariant, kv_format: KVFormat, group_size: int
) -> HostPlanner | None:
    """The native planner, or None where there is no compiler: NumPy plans as well, but slower."""
    try:
        return HostPlanner(variant, kv_format, group_size)
    except (WarploomError, OSError):
        return None


def _index_array(value: Any, name: str) -> IndexArray:
    """An index array on the host; page numbers may stay on the device."""
    if value is None:
        return None, 0, 0
    if isinstance(value, _Tensor) and is_index_tensor(value):
        if value.is_cpu:
            return value, value.data_ptr(), value.numel()
        if name == "kv_indices":
            return value, 0, value.numel()
    array = host_int32(value, name)  # the array itself if it is one of int32
    return array, array.__array_interface__["data"][0], len(array)


def is_index_tensor(value: torch.Tensor) -> bool:
    """True for what a native planner reads as it is."""
    return value.dtype is _INT32 and value.dim() == 1 and value.is_contiguous()
