"""Plans by a planner kernel, from lengths in device memory, without the host."""

from __future__ import annotations

import torch

from warploom.codegen.build import build
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.source import TileChoice
from warploom.dsl.types.formats import KVFormat
from warploom.errors import ArgumentError, BoundsExceeded, MissingInput
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.loaded import load
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Arguments, Batch, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.site import Site
from warploom.runtime.strategies.size_classes import SizeClasses
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.index_arrays import is_index_tensor
from warploom.scheduler.model.constants import OPTIONS
from warploom.scheduler.model.layout import c_planning

_MOST_THREADS = 1024
_MOST_TEAMS = 32  # every team finds all cuts; teams share the writing
# each thread may object once, and 16 bits of a number count them (`vote` of team.cuh)
assert _MOST_TEAMS * _MOST_THREADS < 2**16
_ITEMS, _BLOCKS = 32, 2048  # per team; with fewer a team is no faster


class DeviceStrategy:
    """Plans from lengths on the device, if bounds are declared and tiles are few."""

    def __init__(self, classes: SizeClasses) -> None:
        self._classes, self._rules = classes, classes.rules
        options = self._rules.options
        stored = format_of(self._rules.spec.kv_format)
        is_cuda = self._rules.device.type == "cuda" and stored.plans_on_device
        self._may_be = is_cuda and options.bounds is not None and options.may_plan_natively
        # All planners are kept, since a CUDA graph may replay any of them.
        self._planners: dict[tuple[int, int, int], DevicePlanner] = {}

    def prepare(self) -> None:
        if self._may_be:
            has_roles = self._rules.always_has_roles
            spec = PlannerSpec(self._rules.spec.variant, has_roles)
            source = spec.render("cuda", c_planning(has_roles))
            build(source, cuda_facts(self._rules.device.index).arch)

    def read(self, given: Arguments) -> OnDevice | None:
        """The batch, if the device can plan it; raises BoundsExceeded for too many requests."""
        if not self._may_be or given.kv_lens is not None:
            return None
        rules, bounds = self._rules, self._rules.options.bounds
        assert bounds is not None  # `_may_be` implies bounds
        tensors = device_lengths(given, rules.spec.kv_format, rules.device)
        if tensors is None:
            return None
        requests = len(given.qo_indptr) - 1
        rows = bounds.max_q_rows if given.q_rows is None else given.q_rows
        batch = OnDevice.of(tensors, requests, rows, bounds)
        choice = rules.one_tile(batch)
        if choice.pretransformed_keys or rules.partition(batch, choice.tile).deals:
            return None
        if requests > min(bounds.max_requests, bounds.segments):
            most = min(bounds.max_requests, bounds.segments)
            raise BoundsExceeded(name="max_requests", got=requests, bound=most)
        return batch

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned | None:
        """Enqueue a planner kernel on the current stream.

        Raises:
            ArgumentError: the bounds are too large for the planner's memory on the device.
            MissingInput: the mask reads a tensor that has no value yet.
        """
        if not isinstance(batch, OnDevice):
            return None
        size_class = self._classes.of(batch, choice)
        assert not size_class.partition.deals  # checked by `read`
        if not size_class.site.is_in_range:
            reason = "allow more work than the device's planner counts; declare smaller ones"
            raise ArgumentError(name="bounds", reason=f"{reason}, or give the lengths on the host")
        workspace = self._classes.memory.workspace
        workspace.fit(size_class.size)
        planner = self._planner(size_class.site)
        planner.write(batch, inputs, size_class.site, workspace.address("plan"))
        planner.params.set("votes", workspace.address("votes"))
        planner.launch(torch.cuda.current_stream(self._rules.device).cuda_stream)
        return self._classes.planned(batch, size_class, inputs, "the device")

    def _planner(self, site: Site) -> DevicePlanner:
        rules, device = self._rules, self._rules.device
        key = (*grid_of(site, rules.heads.num_kv), site.scratch)
        if key not in self._planners:
            arch = cuda_facts(device.index).arch
            if site.scratch > arch.shared_per_cta - PlannerSpec.RESERVED:
                reason = (
                    f"allow {site.max_tiles} query tiles, for which the device needs "
                    f"{site.scratch} bytes of shared memory, of {arch.shared_per_cta}; declare "
                    "smaller ones, or give the lengths on the host"
                )
                raise ArgumentError(name="bounds", reason=reason)
            threads, teams, scratch = key
            has_roles = rules.always_has_roles
            spec = PlannerSpec(rules.spec.variant, has_roles, threads, scratch)
            self._planners[key] = DevicePlanner(spec, device, teams)
        return self._planners[key]


def grid_of(site: Site, num_kv_heads: int) -> tuple[int, int]:
    """Threads per team, and number of teams, of the planner for a site's largest batch."""
    # One thread per tile or boundary; more threads would only wait for one another.
    wanted = max(site.max_tiles, OPTIONS * (site.slices + 1), 128)
    threads = min(_MOST_THREADS, -(-wanted // 128) * 128)
    items, blocks = site.max_tiles * num_kv_heads, site.room.bounds.max_blocks
    teams = max(-(-items // _ITEMS), -(-blocks // _BLOCKS), 1)
    return threads, min(_MOST_TEAMS, teams)


class DevicePlanner:
    """The planner kernel of one mask, for batches of one size.

    Attributes:
        params: the kernel's argument.
    """

    def __init__(self, spec: PlannerSpec, device: torch.device, teams: int) -> None:
        """Build and load the kernel.

        Args:
            spec: the mask, and threads and scratch bytes of a team.
            device: where it runs.
            teams: see `grid_of`.

        Raises:
            CompileForbidden: a CUDA graph is being captured.
            CompileError, NoCudaCompiler, LaunchError: the kernel could not be built.
        """
        source = spec.render("cuda", c_planning(spec.has_roles))
        kernel = load(spec, source, cuda_facts(device.index).arch, device, teams)
        self._name, self._device = spec.variant.name, device
        self.params = PlannerParams(spec.variant, spec.has_roles)
        self._enqueue = kernel.bind(self.params)

    def write(self, batch: OnDevice, inputs: Inputs, site: Site, address: int) -> None:
        """Write the kernel's argument.

        Args:
            batch: lengths on the device.
            inputs: inputs of the mask.
            site: the kernel and the layout.
            address: device address of the plan.

        Raises:
            MissingInput: the mask reads a tensor that has no value yet.
        """
        params, bounds = self.params, batch.bounds
        values = {**inputs.scalars, **inputs.tensors}
        for name in sorted(params.inputs - values.keys()):
            expected = "a value for plan(), which reads it on the device"
            raise MissingInput(variant=self._name, name=name, expected=expected)
        inputs.fix(params.inputs)
        listed = batch.tensors[3]
        blocks = min(bounds.max_blocks, 0 if listed is None else len(listed))
        rows = min(batch.q_rows, bounds.max_q_rows)
        params.write_inputs(values)
        params.write_lengths(*(0 if part is None else part.data_ptr() for part in batch.tensors))
        params.write_outputs(*site.outputs(address))
        params.write_batch(batch.num_requests, rows, bounds.max_kv_len, blocks)
        params.write_site(*site.numbers)

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on a stream, given the stream's handle."""
        with torch.cuda.device(self._device):
            self._enqueue(stream)


def device_lengths(
    given: Arguments, kv_format: KVFormat, device: torch.device
) -> tuple[torch.Tensor | None, ...] | None:
    """qo_indptr, kv_indptr, last_page_len and kv_indices, if all required ones are on the device.

    Args:
        given: the arguments of `plan`.
        kv_format: determines which arrays are required.
        device: the wrapper's device.
    """
    qo, kv, indices, last = given[:4]
    if type(qo) is torch.Tensor and qo.is_cpu:
        return None  # early exit, since this is the most frequent case
    is_paged = bool(format_of(kv_format).takes)
    needed = (qo, kv, last, indices) if is_paged else (qo, kv)
    for value in needed:
        if not isinstance(value, torch.Tensor) or value.is_cpu or value.device != device:
            return None
        if not is_index_tensor(value):
            return None
    unwanted = not is_paged and not (last is indices is None)
    fit = len(kv) == len(qo) >= 1 and (last is None or len(last) == len(qo) - 1)
    return None if unwanted or not fit else (qo, kv, last, indices)
