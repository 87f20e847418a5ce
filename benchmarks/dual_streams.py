"""Half-batches on two streams beside one stream, whose transfers are stand-ins of known duration.

    python benchmarks/dual_streams.py [--device cpu] [--quick]

A layer is attention, a transfer, an MLP and a transfer, as with experts on other devices: 64
decodes over 4k keys, or a chunk of 2,048 rows. On one stream they follow one another; on two, each
half's transfers run beside the computation of the other half, in the order of `DualStreams`. A
transfer is a kernel that holds 16 SMs for as long as a link of the device would take; with
`sm_limit` attention has as many CTAs fewer as these SMs hold; where an SM holds two, which SMs that
frees is left to the device, and products of torch ask for all. Beside each figure stands
what `warploom.simulate` makes of the times of the parts, each measured alone. A step is one graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from harness import Report, Row, arguments
from stand_in import StandIn
from torch.nn.functional import linear, rms_norm, silu

import warploom as wl
from warploom.prefetch import H200
from warploom.serving.simulation.comparisons import step_seconds
from warploom.serving.simulation.costs import GivenCosts, Section
from warploom.serving.simulation.steps import Batch, Piece, Step
from warploom.simulate import DualStreams, Serial

PAGE, TRANSFER_SMS, EXPERTS_OF_A_ROW, TOLERANCE = 16, 16, 8, 2e-2
Result = TypeVar("Result")
Sections = dict[Batch, tuple[Section, ...]]
WAYS = ("one stream", "two streams", "two streams, sm_limit")


@dataclass(frozen=True)
class LayerShape:
    """Widths of layers, and the requests of a step: rows and keys of each."""

    name: str
    pieces: tuple[tuple[int, int], ...]
    layers: int = 4
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    ffn: int = 14_336
    dtype: torch.dtype = torch.bfloat16

    @property
    def step(self) -> Step:
        return Step(0, (Batch(tuple(Piece(i, *one) for i, one in enumerate(self.pieces))),))


SHAPES = (
    LayerShape("decode, 64 x 4k", ((1, 4096),) * 64),
    LayerShape("chunk, 2k of 4k", ((2048, 4096),)),
)
SMALL: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "dim": 32, "ffn": 128,
    "dtype": torch.float32,
}  # fmt: skip
TINY = (
    LayerShape("decode, tiny", ((1, 40),) * 4, **SMALL),
    LayerShape("chunk, tiny", ((24, 40),), **SMALL),
)


class Model:
    """Weights and caches of some layers, and the transfers between their parts."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        width, hidden = shape.heads * shape.dim, shape.hidden
        self.pages_each = max(-(-keys // PAGE) for _, keys in shape.pieces)
        pages = (2, len(shape.pieces) * self.pages_each, PAGE, shape.kv_heads, shape.dim)
        sizes = (width, hidden), (hidden, width), (2 * shape.ffn, hidden), (hidden, shape.ffn)
        self.layers = [[self._random(*size) for size in sizes] for _ in range(shape.layers)]
        self.caches = [tuple(self._random(*pages)) for _ in range(shape.layers)]
        self.x = self._random(shape.step.rows, hidden) * hidden**0.5
        self.transfer = StandIn(device, TRANSFER_SMS)

    def _random(self, *size: int) -> torch.Tensor:
        made = torch.randn(size, device=self.device) / size[-1] ** 0.5
        return made.to(self.shape.dtype)

    def transfer_seconds(self, rows: int) -> float:
        """Of rows to the experts of others, or back, over a link of an H200."""
        size = rows * EXPERTS_OF_A_ROW * self.shape.hidden * 2
        return H200.link_latency + size / H200.link_bandwidth


class Part:
    """A whole batch, or a micro-batch, with a plan of its own."""

    def __init__(self, model: Model, batch: Batch, leaves: int = 0) -> None:
        """Plan it.

        Args:
            model: whose layers it goes through.
            batch: its requests.
            leaves: as many CTAs as so many SMs hold get no work of attention.
        """
        shape = model.shape
        self._model, self.rows = model, batch.rows
        self.transfer_seconds = model.transfer_seconds(batch.rows)
        self._attention = self._planned(batch, None)
        if leaves and model.device.type == "cuda":
            sms = torch.cuda.get_device_properties(model.device).multi_processor_count
            planned = self._attention.planned
            assert planned is not None
            ctas = planned.kernel.num_ctas * (sms - leaves) // sms
            self._attention = self._planned(batch, ctas)
        elif leaves:
            self._attention = self._planned(batch, 1)
        self._by_head = self.rows, shape.heads, shape.dim

    def _planned(self, batch: Batch, sm_limit: int | None) -> wl.AttentionWrapper:
        shape = self._model.shape
        attention = wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim=shape.dim, dtype=shape.dtype,
            device=self._model.device, sm_limit=sm_limit,
        )  # fmt: skip
        counts = [-(-one.keys // PAGE) for one in batch.pieces]
        firsts = [one.request * self._model.pages_each for one in batch.pieces]
        attention.plan(
            np.cumsum([0, *(one.rows for one in batch.pieces)]),
            np.cumsum([0, *counts]),
            kv_indices=[at + i for at, n in zip(firsts, counts, strict=True) for i in range(n)],
            last_page_len=[(one.keys - 1) % PAGE + 1 for one in batch.pieces],
        )
        return attention

    def attend(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        project, out = self._model.layers[layer][:2]
        q = linear(rms_norm(x, x.shape[-1:]), project).view(self._by_head)
        attended = self._attention.run(q, self._model.caches[layer])
        return x + linear(attended.flatten(1), out)

    def mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        up, down = self._model.layers[layer][2:]
        gate, value = linear(rms_norm(x, x.shape[-1:]), up).chunk(2, dim=1)
        return x + linear(silu(gate) * value, down)

    def move(self) -> None:
        self._model.transfer(self.transfer_seconds)


class Streams:
    """The current stream, for computation, and one for transfers; on a CPU there is one order."""

    def __init__(self, device: torch.device) -> None:
        self._transfers = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self, move: Callable[[], None]) -> Callable[[], None]:
        """Enqueue a transfer behind all that is computed by now; returns how to wait for it."""
        if self._transfers is None:
            move()
            return lambda: None
        self._transfers.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._transfers):
            move()
            done = torch.cuda.Event()
            done.record()
        return done.wait


def on_one_stream(model: Model, part: Part) -> torch.Tensor:
    x = model.x
    for layer in range(model.shape.layers):
        x = part.attend(x, layer)
        part.move()
        x = part.mlp(x, layer)
        part.move()
    return x


def on_two_streams(model: Model, parts: Sequence[Part], streams: Streams) -> torch.Tensor:
    """Each half waits for its own transfers alone."""
    xs = list(model.x.split([part.rows for part in parts]))
    waits: list[Callable[[], None]] = [lambda: None for _ in parts]
    for layer in range(model.shape.layers):
        for compute in ("attend", "mlp"):
            for i, part in enumerate(parts):
                waits[i]()
                xs[i] = getattr(part, compute)(xs[i], layer)
                waits[i] = streams.beside(part.move)
    for wait in waits:
        wait()
    return torch.cat(xs)


def captured(call: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """The call, or the replay of a graph of it, with what it returns."""
    call()
    if device.type == "cpu":
        return call
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Result:
        graph.replay()
        return out

    return replay


def seconds_of(call: Callable[[], object], device: torch.device, turns: int) -> list[float]:
    """Sorted times of a call, each the mean of some in a row, behind one that is not counted."""
    found, in_a_row = [], 5 if device.type == "cuda" else 1
    for _ in range(turns + 1):
        if device.type == "cuda":
            begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begins.record()
            for _ in range(in_a_row):
                call()
            ends.record()
            ends.synchronize()
            found.append(begins.elapsed_time(ends) / in_a_row / 1e3)
        else:
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    return sorted(found[1:])


@dataclass(frozen=True)
class PartCosts(GivenCosts):
    """Costs of a layer as they were measured, for each batch of a way."""

    measured: Sections = field(default_factory=dict)

    def layer(self, step: Step, compute: float, communication: float) -> Sequence[Section]:
        return self.measured[step.batches[0]]


def sections_of(model: Model, part: Part, turns: int) -> tuple[Section, ...]:
    """Each part of a layer alone, on one stream: the mean of all layers."""
    layers = range(model.shape.layers)
    x = model.x[: part.rows]
    calls: tuple[tuple[str, Callable[[int], object]], ...] = (
        ("attention", lambda layer: part.attend(x, layer)),
        ("experts", lambda layer: part.mlp(x, layer)),
        ("transfer", lambda layer: part.move()),
    )
    found = {}
    for name, call in calls:
        graph = captured(lambda call=call: [call(layer) for layer in layers], model.device)
        found[name] = statistics.median(seconds_of(graph, model.device, turns)) / len(layers)
    return (
        Section("attention", "compute", found["attention"]),
        Section("dispatch", "communication", found["transfer"]),
        Section("experts", "compute", found["experts"]),
        Section("combine", "communication", found["transfer"]),
    )


class Bench:
    """One batch in all ways."""

    def __init__(self, shape: LayerShape, device: torch.device, turns: int) -> None:
        self.shape, self.device, self.turns = shape, device, turns
        self.model, self._streams = Model(shape, device), Streams(device)
        self._whole = shape.step.batches[0]
        self._halves = [half.batches[0] for half in shape.step.micro(2)]
        self._truth: torch.Tensor | None = None  # what the first way computes

    def row(self, benchmark: str, way: str) -> Row:
        """Measured, and simulated from the parts that the way has."""
        leaves = TRANSFER_SMS if way.endswith("sm_limit") else 0
        batches = [self._whole] if way == WAYS[0] else self._halves
        parts = {batch: Part(self.model, batch, leaves) for batch in batches}
        call = captured(self._call(list(parts.values())), self.device)
        out = call().double()
        self._truth = out.clone() if self._truth is None else self._truth
        error = float((out - self._truth).norm() / self._truth.norm())
        times = [1e3 * one for one in seconds_of(call, self.device, self.turns)]
        sections = {
            batch: sections_of(self.model, part, self.turns) for batch, part in parts.items()
        }
        is_right, ms = error <= TOLERANCE, statistics.median(times)
        return Row(
            benchmark, self.shape.name, way, round(ms, 4) if is_right else None, "ms",
            ms=round(ms, 5), ms_low=round(times[len(times) // 10], 5),
            ms_high=round(times[-1 - len(times) // 10], 5), samples=len(times), error=error,
            params=self._params(way, sections), note="" if is_right else "wrong: relative error",
        )  # fmt: skip

    def _call(self, parts: list[Part]) -> Callable[[], torch.Tensor]:
        if len(parts) == 1:
            return partial(on_one_stream, self.model, parts[0])
        return partial(on_two_streams, self.model, parts, self._streams)

    def _params(self, way: str, sections: Sections) -> dict[str, Any]:
        costs = PartCosts((), layers=self.shape.layers, measured=sections)
        schedule = Serial() if way == WAYS[0] else DualStreams()
        simulated = step_seconds(schedule, costs, self.shape.step)
        parts = [
            {one.name: round(1e6 * one.seconds, 2) for one in of_batch}
            for of_batch in sections.values()
        ]
        return {
            "layers": self.shape.layers, "rows": self._whole.rows, "keys": self._whole.keys,
            "simulated_ms": round(1e3 * simulated, 5), "parts_us": parts,
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    device, on_gpu = options.device, options.device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    report = Report("dual_streams" if on_gpu else "dual_streams_cpu", device, options.out)
    with torch.inference_mode():
        for shape in SHAPES if on_gpu else TINY:
            torch.manual_seed(0)
            bench = Bench(shape, device, 3 if options.quick else 21)
            for way in WAYS:
                report.add(bench.row(report.benchmark, way))
    report.finish()


if __name__ == "__main__":
    main()
