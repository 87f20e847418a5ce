"""The planner compiled for the host: it reads, measures and plans the batches of one wrapper."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import MEASURE, REPLAN, ROLE_TILES, PlannerSpec
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.devices.library import load_library
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Arguments, Measured, RoleSizes, RoleTiles, Sizes
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.replan import ReplanGuard
from warploom.runtime.strategies.site import Site
from warploom.runtime.tensors.index_arrays import IndexArrays, IndexReader
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.layout import c_planning

_ANY = Bounds(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH, INT32_MAX)
_MEASURE = struct.Struct("=7i")  # warploom::Measure
_REFUSED, _UNSENT = -1, -2  # warploom::ReplanStatus
_CHANGED = "a batch changed while it was planned"
_ROLE_TILES = struct.Struct("=2q")  # warploom::RoleTiles


class HostPlanner:
    """The native planner of one mask and storage.

    Attributes:
        params: the argument of its compiled functions.
        reader: finds index arrays; planners of one wrapper hand it on to each other, with what it
            knows of the arrays.
    """

    def __init__(
        self,
        variant: TracedVariant,
        kv_format: KVFormat,
        heads: Heads,
        has_roles: bool = False,
        longest_first: bool = False,
    ) -> None:
        """Build and load it.

        Args:
            variant: only its mask matters.
            kv_format: a format with a `native_storage`.
            heads: query heads and key/value heads.
            has_roles: its plans have two roles.
            longest_first: it assigns tiles longest first.

        Raises:
            NoHostCompiler, CompileError, CompileForbidden: the planner cannot be built.
        """
        spec = PlannerSpec(variant, has_roles, longest_first=longest_first)
        source = spec.render("cpp", c_planning(has_roles))
        artifact = build(source, host_target())
        library = load_library(artifact)
        self._plan = library[artifact.entry]
        self._measure = library[MEASURE]
        self._count_roles = library[ROLE_TILES]
        self._replan = library[REPLAN]
        entries = self._plan, self._measure, self._count_roles, self._replan
        for entry, arguments in zip(entries, (2, 2, 3, 5), strict=True):
            entry.argtypes = (ctypes.c_void_p,) * arguments
        self._format = stored = format_of(kv_format)
        self._is_paged = bool(stored.takes)
        self.params = PlannerParams(variant, has_roles, longest_first)
        # The numbers of a site that measuring and counting read.
        assert stored.native_storage is not None
        self.params.set("storage", stored.native_storage)
        self.params.set("page_size", kv_format.block_kv)
        self.params.set("group_size", heads.group_size)
        self.params.set("num_q_heads", heads.num_q)
        self.params.set("num_kv_heads", heads.num_kv)
        names = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
        self.reader = IndexReader(*names[: 4 if self._is_paged else 2])
        self._take_bounds(None)
        self._lengths: IndexArrays | None = None  # arrays that the parameters point to
        self._found = ctypes.create_string_buffer(_MEASURE.size)
        self._found_at = ctypes.addressof(self._found)
        # warploom::RoleSizes, and their addresses
        self._sizes: dict[RoleSizes, tuple[ctypes.Array[ctypes.c_int], int]] = {}
        self._counts = ctypes.create_string_buffer(_ROLE_TILES.size)
        self._counts_at = ctypes.addressof(self._counts)
        self._written: Site | None = None  # the site whose numbers the parameters have
        self._reserve(0)

    def measure(self, given: Arguments, bounds: Bounds | None) -> Measured | None:
        """Check a batch; None if something is wrong: `make_batch` will report it.

        Args:
            given: the arguments of `plan`.
            bounds: the largest batch, if declared.
        """
        if bounds is not self._bounds:
            self._take_bounds(bounds)
        arrays = self._arrays(given)
        if arrays is None:
            return None
        lengths = self.reader(*arrays)
        if not self._point_to(lengths) or self._measure(self.params.address, self._found_at) != 0:
            return None
        return self._measured(lengths)

    def known(self, given: Arguments) -> IndexArrays | None:
        """Lengths that can be read as they are; None if `measure` must examine them."""
        arrays = self._arrays(given)
        return None if arrays is None else self.reader.known(*arrays)

    def replan(
        self, lengths: IndexArrays, guard: ReplanGuard, delivery: int
    ) -> tuple[Measured, bool] | None:
        """Measure a batch, plan it like the last one, and send the plan.

        None if the batch is not like the last one, or invalid.

        Args:
            lengths: lengths that `known` returned.
            guard: which batches are planned this way; inputs are unchanged.
            delivery: result of `Upload.delivery`.

        Returns:
            The batch, and whether its plan was sent.

        Raises:
            RuntimeError: the batch has changed since it was measured.
        """
        if not self._point_to(lengths):
            return None
        assert guard.size_class.site is self._written  # see `plan`
        status = self._replan(
            self.params.address, guard.address, self._found_at, self._scratch_at, delivery
        )
        if status == _REFUSED:
            return None
        if status not in (0, _UNSENT):
            raise RuntimeError(_CHANGED)
        return self._measured(lengths), status == 0

    def _arrays(self, given: Arguments) -> tuple[Any, ...] | None:
        """The index arrays in the order of planners; None if one is missing or unexpected."""
        qo, kv, indices, last, kv_lens, _ = given
        if qo is None or kv is None or kv_lens is not None:
            return None
        if not self._is_paged:
            return (qo, kv) if indices is last is None else None
        return None if indices is None or last is None else (qo, kv, last, indices)

    def _measured(self, lengths: IndexArrays) -> Measured:
        """The measured batch, of valid lengths."""
        busy, q_rows, total, longest_q, longest, blocks, extent = _MEASURE.unpack(self._found)
        requests, mean = lengths.counts[0] - 1, total / busy if busy else 1.0
        sizes = Sizes(requests, requests, total, mean, total, longest_q, longest, blocks)
        return Measured(q_rows, extent, sizes, lengths, self._format)

    def count(self, lengths: IndexArrays, inputs: Inputs, sizes: RoleSizes) -> RoleTiles | None:
        """Key tiles of both roles in measured lengths; None if the mask reads unknown values."""
        if not self.has_mask_inputs(inputs):
            return None
        self.take(lengths, self._bounds)
        self._write_inputs(inputs)
        given = self._sizes.get(sizes)
        if given is None:
            made = (ctypes.c_int * len(sizes))(*sizes)
            given = self._sizes[sizes] = made, ctypes.addressof(made)
        self._count_roles(self.params.address, given[1], self._counts_at)
        return RoleTiles(*_ROLE_TILES.unpack(self._counts))

    def take(self, lengths: IndexArrays, bounds: Bounds | None) -> None:
        """Set the batch for `plan`, which this planner or another has measured."""
        if bounds is not self._bounds:
            self._take_bounds(bounds)
        if lengths is not self._lengths:
            self._point_to(lengths)

    def release(self) -> None:
        """Drop the arrays of the current batch."""
        self._lengths = None

    def _point_to(self, lengths: IndexArrays) -> bool:
        """Point the parameters to lengths; False if their numbers of entries disagree."""
        self._lengths, largest = lengths, self._largest
        if self._is_paged:
            ends, kv_ends, requests, pages = lengths.counts
            self.params.write_lengths(*lengths.addresses)
        else:
            (ends, kv_ends), pages = lengths.counts, 0
            requests = ends - 1
            self.params.write_lengths(*lengths.addresses, 0, 0)
        if requests != ends - 1 or kv_ends != ends or not 0 <= requests <= self._most_requests:
            return False
        pages = min(largest.max_blocks, pages)
        self.params.write_batch(requests, largest.max_q_rows, largest.max_kv_len, pages)
        return True

    def _take_bounds(self, bounds: Bounds | None) -> None:
        self._bounds, self._largest, self._lengths = bounds, bounds or _ANY, None
        self._most_requests = min(self._largest.max_requests, self._largest.segments)

    def has_mask_inputs(self, inputs: Inputs) -> bool:
        """True if the host knows all values that the mask reads."""
        needed = self.params.inputs
        return not needed or needed.issubset((*inputs.scalars, *inputs.known))

    def _write_inputs(self, inputs: Inputs) -> None:
        if self.params.inputs:
            self.params.write_inputs({**inputs.scalars, **inputs.known})

    def _reserve(self, scratch: int) -> None:
        """Allocate at least `scratch` bytes of scratch memory."""
        self._scratch = np.empty(0, np.uint8)  # marks it as too short if an interrupt comes now
        memory = np.zeros(scratch + 16, np.uint8)
        self._scratch_at = -(-memory.ctypes.data // 16) * 16
        self._scratch = memory

    def plan(self, inputs: Inputs, site: Site, address: int) -> None:
        """Write the plan of the batch that `take` or `measure` set last to host memory.

        Args:
            inputs: the mask's inputs, all known.
            site: the kernel, and a layout with room for the batch.
            address: address of the plan.

        Raises:
            RuntimeError: the batch has changed since it was measured.
        """
        if site is not self._written:
            self._written = None  # an interrupt may come before all is written
            self.params.write_site(*site.numbers)
            if len(self._scratch) < site.scratch + 16:
                self._reserve(site.scratch)
            self._written = site
        self._write_inputs(inputs)
        self.params.write_outputs(*site.outputs(address))
        if self._plan(self.params.address, self._scratch_at) != 0:
            raise RuntimeError(_CHANGED)
