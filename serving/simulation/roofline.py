"""Costs of a step by a roofline over measured rates: bytes, operations, and a share of the SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from warploom.serving.prefetch.accelerators import H200, Accelerator
from warploom.serving.prefetch.model_shapes import ModelShape, Operation
from warploom.serving.prefetch.performance import collective_seconds
from warploom.serving.simulation.checks import check_kind
from warploom.serving.simulation.cores import SPREADINGS, Spreading, heaviest
from warploom.serving.simulation.costs import HostSeconds, Section, check_cost
from warploom.serving.simulation.measured import DECODE_PLAN, RECORDED, Line, Measured
from warploom.serving.simulation.steps import Batch, Step
from warploom.simulation_errors import BadSetup

# What one SM reads beside others, between the two decode tiles of `Streamed.sm_bandwidth`, and how
# many SMs then read as fast as all.
SM_BANDWIDTH = 52e9
SATURATING_SMS = 81
# Assumed: nobody has measured here how many SMs keep the links busy. DeepEP takes about 20.
LINK_SMS = 20
# Assumed: one replay of a graph of the step on the host.
REPLAY = 10e-6


@dataclass(frozen=True)
class Engine:
    """What an engine's host does in a step besides planning. Assumed, unless you measure yours.

    Attributes:
        schedule: seconds to choose the batch and to make its inputs, by requests.
        output: to read tokens and to pass them on.
    """

    schedule: Line = field(default=Line(0.0, 0.0))
    output: Line = field(default=Line(0.0, 0.0))

    def __post_init__(self) -> None:
        for name in ("schedule", "output"):
            line = getattr(self, name)
            check_cost(f"{name} of an engine", line.fixed)
            check_cost(f"{name} of an engine, for a request", line.each)


@dataclass(frozen=True)
class Machine:
    """A device at the rates that were measured on it.

    Attributes:
        chip: its links, and what has not been measured.
        measured: rates, and times of plans and small kernels.
        sms: of the device.
        saturating: of them that read as fast as all.
        link_sms: of them that keep the links busy.
    """

    chip: Accelerator = H200
    measured: Measured = RECORDED
    sms: int = 132
    saturating: int = SATURATING_SMS
    link_sms: int = LINK_SMS

    @property
    def rates(self) -> Accelerator:
        found = self.measured
        return replace(
            self.chip, throughput=found.throughput, memory_bandwidth=found.bandwidth
        )  # fmt: skip


@dataclass(frozen=True)
class RooflineCosts:
    """A model on a machine.

    An operation takes the longer of its reads and its arithmetic. Groups are data-parallel for
    attention: each waits for the slowest, whose time counts. Experts are spread over the devices of
    all groups, and rows go there and back by two all-to-all transfers; other models have their MLP
    in each group. A share of the SMs has as much of the arithmetic, and of the bandwidth what its
    SMs can read. That both streams want the same memory is left out.

    Attributes:
        model: its shape.
        machine: device.
        devices: of a group (tensor parallelism).
        groups: of an engine.
        vocabulary: tokens; 0 leaves their product out.
        engine: host's costs besides plans.
        spreading: of decoding work over SMs.

    Raises:
        BadCost: fewer than one device or group.
        BadSetup: no such spreading; a model, machine or engine that is none; or a model with
            counts below 1, or heads that share no whole number of key/value heads.
    """

    model: ModelShape
    machine: Machine = field(default_factory=Machine)
    devices: int = 1
    groups: int = 1
    vocabulary: int = 0
    engine: Engine = field(default_factory=Engine)
    spreading: Spreading = "cut"

    def __post_init__(self) -> None:
        shape = "a ModelShape(name, layers, hidden, heads, kv_heads, ffn)"
        check_kind("model", self.model, ModelShape, f"{shape}, or one of warploom.prefetch.MODELS")
        _check_shape(self.model)
        machine = "a Machine, such as Machine(chip=warploom.prefetch.H100)"
        check_kind("machine", self.machine, Machine, machine)
        check_kind("engine", self.engine, Engine, "an Engine, such as Engine(schedule=Line(0, 0))")
        for name in ("devices", "groups"):
            check_cost(name, getattr(self, name), name, above_zero=True)
        check_cost("vocabulary", self.vocabulary, "tokens")
        if self.spreading not in SPREADINGS:
            expected = f"one of {', '.join(map(repr, SPREADINGS))}"
            raise BadSetup(name="spreading", got=repr(self.spreading), expected=expected)

    @property
    def layers(self) -> int:
        return self.model.layers

    def host(self, step: Step) -> HostSeconds:
        """Groups have hosts of their own, of which the busiest counts."""
        requests = max(len(batch.pieces) for batch in step.batches)
        mixed = any(batch.prefills for batch in step.batches)
        plan = self.machine.measured.mixed_plan if mixed else DECODE_PLAN
        engine = self.engine
        return HostSeconds(
            engine.schedule(requests) + REPLAY, plan(requests), engine.output(requests)
        )

    def planner(self, step: Step) -> float:
        return self.machine.measured.planner_kernel(max(len(b.pieces) for b in step.batches))

    def swap(self, step: Step) -> float:
        return self.machine.measured.append_kernel(max(len(b.pieces) for b in step.batches))

    def layer(self, step: Step, compute: float, communication: float) -> Sequence[Section]:
        attention = max(self._attention(batch, compute, step.moved) for batch in step.batches)
        spread_experts = self.groups > 1 and self.model.experts > 1
        mlp = self._mlp(step, compute, spread_experts)
        if spread_experts:
            there = self._exchange(step, communication)
            return [
                Section("attention", "compute", attention),
                Section("dispatch", "communication", there),
                Section("experts", "compute", mlp),
                Section("combine", "communication", there),
            ]
        return self._with_sums(step, communication, attention, mlp)

    def once(self, step: Step) -> float:
        chip, rows = self.machine.rates, max(len(batch.pieces) for batch in step.batches)
        weight = self.vocabulary * self.model.hidden / self.devices
        return max(
            weight * chip.weight_bytes / chip.memory_bandwidth, 2 * rows * weight / chip.throughput
        )

    def _with_sums(
        self, step: Step, communication: float, attention: float, mlp: float
    ) -> Sequence[Section]:
        sections = [Section("attention", "compute", attention), Section("MLP", "compute", mlp)]
        if self.devices == 1:
            return sections
        chip, rows = self.machine.rates, max(batch.rows for batch in step.batches)
        size = rows * self.model.hidden * chip.weight_bytes
        seconds = collective_seconds(chip, self.devices, size) / self._link_share(communication)
        total = Section("all-reduce", "communication", seconds)
        return [sections[0], total, sections[1], total]

    def _exchange(self, step: Step, share: float) -> float:
        """Rows of a device to the experts of others, or back."""
        chip, devices = self.machine.rates, self.devices * self.groups
        rows = max(batch.rows for batch in step.batches) / self.devices
        size = rows * self.model.active * self.model.hidden * chip.weight_bytes
        bytes_out = size * (devices - 1) / devices
        return (chip.link_latency + bytes_out / chip.link_bandwidth) / self._link_share(share)

    def _link_share(self, share: float) -> float:
        return min(1.0, share * self.machine.sms / self.machine.link_sms)

    def _seconds(self, operation: Operation, share: float) -> float:
        machine, chip = self.machine, self.machine.rates
        bandwidth = chip.memory_bandwidth * min(1.0, share * machine.sms / machine.saturating)
        return max(operation.bytes / bandwidth, operation.work / (chip.throughput * share))

    def _attention(self, batch: Batch, share: float, moved: int) -> float:
        if not batch.rows:
            return 0.0
        chip, model = self.machine.rates, self.model
        token = 2 * model.head_dim * chip.weight_bytes  # of one key/value head
        project, attend, out = model.attention(
            self.devices, batch.rows, batch.keys * token, batch.pairs, chip.weight_bytes
        )
        projected = self._seconds(project, share)
        heads = max(1, model.kv_heads // self.devices)
        cores = max(1, int(share * self.machine.sms))
        decodes = [one.keys for one in batch.pieces if one.rows == 1 for _ in range(heads)]
        longest = heaviest(decodes, cores, self.spreading) * token / SM_BANDWIDTH
        attended = max(self._seconds(attend, share), longest)
        # keys that move travel beside the projections (xLLM, figure 12)
        late = max(0.0, moved * heads * token / chip.link_bandwidth - projected)
        return projected + late + attended + self._seconds(out, share)

    def _mlp(self, step: Step, share: float, spread_experts: bool) -> float:
        devices = self.devices * (self.groups if spread_experts else 1)
        rows = step.rows if spread_experts else max(batch.rows for batch in step.batches)
        size = self.machine.rates.weight_bytes
        return sum(self._seconds(one, share) for one in self.model.mlp(devices, rows, size))


def _check_shape(model: ModelShape) -> None:
    """Raise BadSetup for a model that there cannot be."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "head_dim", "experts", "active")
    for name in names:
        got = getattr(model, name)
        if not isinstance(got, int) or isinstance(got, bool) or got < 1:
            raise BadSetup(name=f"{name} of {model.name}", got=got, expected="an int of at least 1")
    if model.heads % model.kv_heads:
        expected = f"a multiple of kv_heads={model.kv_heads}"
        raise BadSetup(name=f"heads of {model.name}", got=model.heads, expected=expected)
    if model.active > model.experts:
        expected = f"at most experts={model.experts}"
        raise BadSetup(name=f"active of {model.name}", got=model.active, expected=expected)
