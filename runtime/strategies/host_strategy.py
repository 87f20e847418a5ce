"""Plans by the planner compiled for the host, which needs no loop in Python."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import MEASURE, ROLE_TILES, PlannerSpec
from warploom.codegen.source import TileChoice
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import WarploomError
from warploom.logs import log
from warploom.runtime.devices.library import load_library
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Arguments, Batch, Measured, RoleSizes, RoleTiles, Sizes
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.rules import may_be_longest_first
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.size_classes import Site, SizeClasses
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.index_arrays import IndexArrays, IndexReader
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.layout import c_structs

_ANY = Bounds(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH, INT32_MAX)
_MEASURE = struct.Struct("=7i")  # warploom::Measure
_ROLE_TILES = struct.Struct("=2q")  # warploom::RoleTiles


class HostStrategy:
    """Plans what it has measured, if the mask's inputs are known."""

    def __init__(self, classes: SizeClasses) -> None:
        rules = classes.rules
        options = rules.options
        self._classes = classes
        self._may_be = options.may_plan_natively
        self._planners: dict[tuple[bool, bool], HostPlanner | None] = {}
        self._last: HostPlanner | None = None  # measures, too: the next batch mostly is alike

    def _found(self) -> HostPlanner | None:
        """A planner, made when first needed; None where there is no compiler."""
        if self._last is None and self._may_be:
            self._last = self._of(self._classes.rules.always_has_roles, longest_first=False)
            self._may_be = self._last is not None
        return self._last

    def _of(self, has_roles: bool, longest_first: bool) -> HostPlanner | None:
        """That of batches which are planned so."""
        kind = has_roles, longest_first
        if kind not in self._planners:
            self._planners[kind] = self._made(*kind)
        return self._planners[kind]

    def _made(self, has_roles: bool, longest_first: bool) -> HostPlanner | None:
        rules = self._classes.rules
        spec = rules.spec
        try:
            return HostPlanner(spec.variant, spec.kv_format, rules.heads, has_roles, longest_first)
        except (WarploomError, OSError) as error:
            log.info("no native planner, so NumPy plans: %s", error)
            return None

    def prepare(self) -> None:
        rules = self._classes.rules
        if self._found() is None:
            return
        if rules.mixes is not None:
            self._of(has_roles=True, longest_first=False)
        tiles, group = {choice.tile for choice in rules.choices()}, rules.heads.group_size
        if any(may_be_longest_first(tile, rules.options, group) for tile in tiles):
            self._of(has_roles=False, longest_first=True)

    def read(self, given: Arguments) -> Measured | None:
        planner = self._last or self._found()
        if planner is None or given.kv_lens is not None:
            return None
        return planner.measure(given, self._classes.rules.options.bounds)

    def count(self, batch: Batch, inputs: Inputs, sizes: RoleSizes) -> RoleTiles | None:
        """Key tiles of both roles of the batch that was measured last; None: NumPy must count."""
        if self._last is None or not isinstance(batch, Measured):
            return None
        return self._last.count(batch.lengths, inputs, sizes)

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned | None:
        classes, memory, last = self._classes, self._classes.memory, self._last
        if last is None or not isinstance(batch, Measured):
            return None
        if not last.knows(inputs):
            return None
        size_class = classes.of(batch, choice)
        if not size_class.site.is_counted:
            return None
        planner = self._of(size_class.has_roles, size_class.lists is not None)
        if planner is None:
            return None
        if planner is not last:
            last.release()
            self._last = planner
        planner.take(batch.lengths, classes.rules.options.bounds)
        memory.workspace.fit(size_class.size)
        target, count = memory.workspace.plan_ints, batch.sizes.num_blocks
        used = size_class.site.room.offsets["indices"] + count
        stage = memory.upload.stage(target)
        if count and not batch.lengths.addresses[3]:  # page numbers on the device stay there
            used -= count
            memory.upload.append(batch.lengths.kept[3], used, count)
        planner.plan(inputs, size_class.site, stage.address)
        memory.upload.send(used)
        return classes.planned(batch, size_class, inputs, "the host, natively")


class HostPlanner:
    """The native planner of one mask and storage.

    Attributes:
        params: its argument.
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
            variant: its mask counts.
            kv_format: one that has a `native_storage`.
            heads: query heads and key/value heads.
            has_roles: its plans have two roles.
            longest_first: it assigns tiles so.

        Raises:
            NoHostCompiler, CompileError, CompileForbidden: there is none to be had.
        """
        spec = PlannerSpec(variant, has_roles, longest_first=longest_first)
        source = spec.render("cpp", c_structs(roles=has_roles))
        artifact = build(source, host_target())
        library = load_library(artifact)
        self._plan = library[artifact.entry]
        self._measure = library[MEASURE]
        self._count_roles = library[ROLE_TILES]
        for entry in (self._plan, self._measure, self._count_roles):
            entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._count_roles.argtypes = (ctypes.c_void_p, *self._count_roles.argtypes)
        self._format = stored = format_of(kv_format)
        self._is_paged = bool(stored.takes)
        self.params = PlannerParams(variant, has_roles, longest_first)
        # Measuring and counting read these of a site.
        assert stored.native_storage is not None
        self.params.set("storage", stored.native_storage)
        self.params.set("page_size", kv_format.block_kv)
        self.params.set("group_size", heads.group_size)
        self.params.set("num_q_heads", heads.num_q)
        self.params.set("num_kv_heads", heads.num_kv)
        names = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
        self._read = IndexReader(*names[: 4 if self._is_paged else 2])
        self._take_bounds(None)
        self._lengths: IndexArrays | None = None  # that the parameters point to
        self._found = ctypes.create_string_buffer(_MEASURE.size)
        self._found_at = ctypes.addressof(self._found)
        # warploom::RoleSizes, and where they lie
        self._sizes: dict[RoleSizes, tuple[ctypes.Array[ctypes.c_int], int]] = {}
        self._counts = ctypes.create_string_buffer(_ROLE_TILES.size)
        self._counts_at = ctypes.addressof(self._counts)
        self._written: Site | None = None  # to the parameters
        self._reserve(0)

    def measure(self, given: Arguments, bounds: Bounds | None) -> Measured | None:
        """Check a batch; None if something is wrong, which `make_batch` will name.

        Args:
            given: the arguments of `plan`.
            bounds: the largest batch, if declared.
        """
        if bounds is not self._bounds:
            self._take_bounds(bounds)
        qo, kv, indices, last = given[:4]
        if qo is None or kv is None:
            return None
        if self._is_paged:
            if indices is None or last is None:
                return None
            lengths = self._read(qo, kv, last, indices)
            ends, kv_ends, requests, _ = lengths.counts
        else:
            if not (indices is last is None):
                return None
            lengths = self._read(qo, kv)
            ends, kv_ends = lengths.counts
            requests = ends - 1
        if requests != ends - 1 or kv_ends != ends or not 0 <= requests <= self._most_requests:
            return None
        self._point_to(lengths, requests)
        if self._measure(self.params.address, self._found_at) != 0:
            return None
        busy, q_rows, total, longest_q, longest, blocks, extent = _MEASURE.unpack(self._found)
        mean = total / busy if busy else 1.0
        known = Sizes(requests, requests, total, mean, total, longest_q, longest, blocks)
        return Measured(q_rows, extent, known, lengths, self._format)

    def count(self, lengths: IndexArrays, inputs: Inputs, sizes: RoleSizes) -> RoleTiles | None:
        """Key tiles of both roles in lengths that were measured; None if the mask reads more."""
        if not self.knows(inputs):
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
        """Take up a batch that was measured, by this planner or another: `plan` is to plan it."""
        if bounds is not self._bounds:
            self._take_bounds(bounds)
        if lengths is not self._lengths:
            self._point_to(lengths, lengths.counts[0] - 1)

    def release(self) -> None:
        """Keep no arrays of the batch that was taken up last."""
        self._lengths = None

    def _point_to(self, lengths: IndexArrays, requests: int) -> None:
        self._lengths = lengths
        largest, pages = self._largest, lengths.counts[3] if self._is_paged else 0
        self.params.write_lengths(*lengths.addresses, *(() if self._is_paged else (0, 0)))
        self.params.write_batch(
            requests, largest.max_q_rows, largest.max_kv_len, min(largest.max_blocks, pages)
        )

    def _take_bounds(self, bounds: Bounds | None) -> None:
        self._bounds, self._largest, self._lengths = bounds, bounds or _ANY, None
        self._most_requests = min(self._largest.max_requests, self._largest.segments)

    def knows(self, inputs: Inputs) -> bool:
        """True if the host has the values of all that the mask reads."""
        needed = self.params.inputs
        return not needed or needed.issubset((*inputs.scalars, *inputs.known))

    def _write_inputs(self, inputs: Inputs) -> None:
        if self.params.inputs:
            self.params.write_inputs({**inputs.scalars, **inputs.known})

    def _reserve(self, scratch: int) -> None:
        """Have so many bytes to plan in, or more."""
        self._scratch = np.zeros(scratch + 16, np.uint8)
        self._scratch_at = -(-self._scratch.ctypes.data // 16) * 16

    def plan(self, inputs: Inputs, site: Site, address: int) -> None:
        """Write the plan of the batch that was taken up last to host memory.

        Args:
            inputs: known ones.
            site: the kernel, and a layout with room for the batch.
            address: where the plan begins.

        Raises:
            RuntimeError: the batch has changed since it was measured.
        """
        if site is not self._written:
            self.params.write_site(*site.numbers)
            if len(self._scratch) < site.scratch + 16:
                self._reserve(site.scratch)
            self._written = site
        self._write_inputs(inputs)
        self.params.write_outputs(*site.outputs(address))
        if self._plan(self.params.address, self._scratch_at) != 0:
            raise RuntimeError("a batch changed while it was planned")
