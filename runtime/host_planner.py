"""The planner compiled for the host: checks a batch and plans it without a Python loop."""

from __future__ import annotations

import ctypes
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
_FOUND = 6  # members of warploom::Measure
_NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
# What measuring does not read: the plan, and numbers from num_ctas to keys and behind group_size.
_NO_OUTPUTS, _NO_GRID, _NO_COSTS = (0,) * 6, (0,) * 6, (0,) * 8


class HostPlanner:
    """The native planner of one mask.

    Attributes:
        params: its argument.
    """

    def __init__(self, variant: TracedVariant) -> None:
        """Build and load it.

        Raises:
            NoHostCompiler, CompileError, CompileForbidden: there is none to be had.
        """
        artifact = build(planner_source(variant, c_structs(), "cpp"), host_target())
        library = ctypes.CDLL(str(Path(artifact.path).resolve()))
        self._plan = library[artifact.entry]
        self._plan.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._measure = library[MEASURE]
        self._measure.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.params = PlannerParams(variant)
        self._found = (ctypes.c_int * _FOUND)()
        self._found_at = ctypes.addressof(self._found)
        self._scratch = np.zeros(0, np.uint8)
        self._scratch_at = 0

    def measure(
        self,
        kv_format: KVFormat,
        arguments: tuple[Any, ...],
        group_size: int,
        bounds: Bounds | None,
    ) -> Measured | None:
        """Check a batch; None if something is wrong, which `make_batch` will name.

        Args:
            kv_format: dense, ragged or paged.
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len, as `plan` was given them.
            group_size: query heads per key/value head.
            bounds: the largest batch, if declared.
        """
        is_paged = isinstance(kv_format, Paged)
        if any((value is not None) != (i < 2 or is_paged) for i, value in enumerate(arguments)):
            return None
        qo, kv, indices, last = map(_index_array, arguments, _NAMES)
        requests, bounds = qo.entries - 1, bounds or _ANY
        if (
            not 0 <= requests <= min(bounds.max_requests, bounds.segments)
            or kv.entries != qo.entries
        ):
            return None
        if is_paged and last.entries != requests:
            return None
        storage = STORAGE[type(kv_format).__name__]
        blocks = min(bounds.max_blocks, indices.entries)
        sizes = bounds.max_q_rows, bounds.max_kv_len, blocks, requests, 0
        numbers = (requests, storage, kv_format.block_kv, *sizes, *_NO_GRID, group_size, *_NO_COSTS)
        pointers = qo.address, kv.address, last.address, indices.address
        self.params.write((*pointers, *_NO_OUTPUTS), numbers)
        if self._measure(self.params.address, self._found_at) != 0:
            return None
        q_rows, longest_q, max_kv_len, kv_end, last_block, busy = self._found
        return Measured(
            lambda: make_batch(kv_format, *arguments),
            lengths=(qo, kv, last, indices),
            num_requests=requests,
            busy_requests=busy,
            q_rows=longest_q if storage == STORAGE["Dense"] else q_rows,
            total_q_rows=q_rows,
            longest_q=longest_q,
            max_kv_len=max_kv_len,
            num_blocks=kv_end if is_paged else 0,
            kv_extent=(max_kv_len, kv_end, last_block + 1)[storage],
        )

    def plan(self, pointers: tuple[int, ...], numbers: tuple[int, ...], scratch: int) -> None:
        """Write a plan.

        Args:
            pointers: INPUTS and OUTPUTS of `codegen.planner_source`, of a measured batch.
            numbers: NUMBERS.
            scratch: bytes that it works in.
        """
        if scratch > len(self._scratch):
            self._scratch = np.zeros(scratch + 16, np.uint8)
            self._scratch_at = -(-self._scratch.ctypes.data // 16) * 16
        self.params.write(pointers, numbers)
        status = self._plan(self.params.address, self._scratch_at)
        if status != 0:
            raise RuntimeError(f"a batch changed while it was planned (status {status})")


def host_planner(variant: TracedVariant) -> HostPlanner | None:
    """The native planner, or None where there is no compiler: NumPy plans as well, but slower."""
    try:
        return HostPlanner(variant)
    except (WarploomError, OSError):
        return None


def _index_array(value: Any, name: str) -> IndexArray:
    """An index array on the host; page numbers may stay on the device."""
    if value is None:
        return IndexArray(None, 0, 0)
    if isinstance(value, torch.Tensor) and is_index_tensor(value):
        if value.is_cpu:
            return IndexArray(value, value.data_ptr(), value.numel())
        if name == "kv_indices":
            return IndexArray(value, 0, value.numel())
    array = host_int32(value, name)  # the array itself if it is one of int32
    return IndexArray(array, array.ctypes.data, len(array))


def is_index_tensor(value: torch.Tensor) -> bool:
    """True for what a native planner reads as it is."""
    return value.dtype is torch.int32 and value.dim() == 1 and value.is_contiguous()
