"""The planner compiled for the host: checks a batch and plans it without a Python loop."""

from __future__ import annotations

import ctypes
import struct
from functools import partial
from typing import Any

import numpy as np

from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import MEASURE, PlannerSpec
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import WarploomError
from warploom.logs import log
from warploom.runtime.devices.library import load_library
from warploom.runtime.formats import format_of, make_batch
from warploom.runtime.formats.batch import Measured
from warploom.runtime.planning.planner_params import PlannerParams
from warploom.runtime.tensors.index_arrays import IndexReader
from warploom.scheduler.bounds import INT32_MAX, Bounds
from warploom.scheduler.layout import c_structs

_ANY = Bounds(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH, INT32_MAX)
_MEASURE = struct.Struct("=7i")  # warploom::Measure


class HostPlanner:
    """The native planner of one mask and storage.

    Attributes:
        params: its argument.
    """

    def __init__(self, variant: TracedVariant, kv_format: KVFormat, group_size: int) -> None:
        """Build and load it.

        Args:
            variant: its mask counts.
            kv_format: one that has a `native_storage`.
            group_size: query heads per key/value head.

        Raises:
            NoHostCompiler, CompileError, CompileForbidden: there is none to be had.
        """
        artifact = build(PlannerSpec(variant).render("cpp", c_structs()), host_target())
        library = load_library(artifact)
        self._plan = library[artifact.entry]
        self._plan.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._measure = library[MEASURE]
        self._measure.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._format = kv_format
        stored = format_of(kv_format)
        self._is_paged = bool(stored.takes)
        self.params = PlannerParams(variant)
        # Measuring reads these three of a site.
        assert stored.native_storage is not None
        self.params.set("storage", stored.native_storage)
        self.params.set("page_size", kv_format.block_kv)
        self.params.set("group_size", group_size)
        names = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
        self._read = IndexReader(*names[: 4 if self._is_paged else 2])
        self._take(None)
        self._found = ctypes.create_string_buffer(_MEASURE.size)
        self._found_at = ctypes.addressof(self._found)
        self.reserve(0)

    def measure(self, arguments: tuple[Any, ...], bounds: Bounds | None) -> Measured | None:
        """Check a batch; None if something is wrong, which `make_batch` will name.

        Args:
            arguments: qo_indptr, kv_indptr, kv_indices and last_page_len, as `plan` was given them.
            bounds: the largest batch, if declared.
        """
        if bounds is not self._bounds:
            self._take(bounds)
        qo, kv, indices, last = arguments
        if qo is None or kv is None:
            return None
        if self._is_paged:
            if indices is None or last is None:
                return None
            lengths = self._read(qo, kv, last, indices)
            ends, kv_ends, requests, pages = lengths.counts
            self.params.write_lengths(*lengths.addresses)
        else:
            if not (indices is last is None):
                return None
            lengths, pages = self._read(qo, kv), 0
            ends, kv_ends = lengths.counts
            requests = ends - 1
            self.params.write_lengths(*lengths.addresses, 0, 0)
        if requests != ends - 1 or kv_ends != ends or not 0 <= requests <= self._most_requests:
            return None
        largest = self._largest
        self.params.write_batch(
            requests, largest.max_q_rows, largest.max_kv_len, min(largest.max_blocks, pages)
        )
        if self._measure(self.params.address, self._found_at) != 0:
            return None
        arrays = partial(make_batch, self._format, *arguments)
        return Measured(arrays, lengths, requests, *_MEASURE.unpack(self._found))

    def _take(self, bounds: Bounds | None) -> None:
        self._bounds, self._largest = bounds, bounds or _ANY
        self._most_requests = min(self._largest.max_requests, self._largest.segments)

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
    except (WarploomError, OSError) as error:
        log.info("no native planner, so NumPy plans: %s", error)
        return None
