"""Decode steps under three schedules: plans in turn, plans a step ahead, plans by the device.

    python benchmarks/async_schedule.py [--device cpu] [--quick] [--only serial,ahead]

64 requests decode with random weights of a model's shape; a step is one CUDA graph: page tables,
layers, next tokens. In turn, the host makes tables, plans, launches, waits for the tokens and reads
them. Ahead, it launches step n + 1 before it reads the tokens of step n, which must be those that
come in turn. By the device, the graph plans. Beside each figure stands what `warploom.simulate`
says of the schedule from the times of the host's parts and of the device's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from harness import Report, Row, arguments
from stand_in_decoder import Decoder, DecoderShape, Weights

from warploom.simulate import (
    Asynchronous,
    GivenCosts,
    Limits,
    Schedule,
    Section,
    Serial,
    simulate,
    synthetic,
)

SHAPES = (  # those of Qwen2.5, which says them in its configurations
    DecoderShape("0.5B", 24, 896, 14, 2, 64, 4864, 151_936, 64, 1024, 128),
    DecoderShape("1.5B", 28, 1536, 12, 2, 128, 8960, 151_936, 64, 1024, 128),
)
TINY = DecoderShape("tiny", 2, 64, 2, 1, 32, 128, 256, 4, 30, 6, torch.float32)


class Host:
    """An engine's host for one decoder: what it knows, and how long each of its parts takes.

    Attributes:
        outputs: tokens of each request.
        seconds: of the parts, one entry for each step.
    """

    def __init__(self, decoder: Decoder) -> None:
        requests, self._is_gpu = decoder.shape.requests, decoder.tokens.is_cuda
        self._decoder = decoder
        self._landed = [
            torch.empty(requests, dtype=torch.int64, pin_memory=self._is_gpu) for _ in range(2)
        ]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._is_gpu else []
        self.begin()

    def begin(self) -> None:
        """From the first step on."""
        shape = self._decoder.shape
        self._decoder.reset()
        self._lens = np.full(shape.requests, shape.length)
        self.outputs: list[list[int]] = [[] for _ in range(shape.requests)]
        self.seconds: dict[str, list[float]] = {"plan": [], "launch": [], "wait": [], "read": []}
        if self._is_gpu:
            torch.cuda.synchronize()

    @contextmanager
    def _timed(self, part: str) -> Any:
        begin = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - begin)

    def launch(self, number: int) -> None:
        """Plan, if the device does not, and enqueue a step and the copy of its tokens."""
        with self._timed("plan"):
            self._lens += 1
            if not self._decoder.plans:
                self._decoder.plan(self._lens)
        with self._timed("launch"):
            self._decoder.step()
            self._landed[number % 2].copy_(self._decoder.tokens, non_blocking=True)
            if self._is_gpu:
                self._events[number % 2].record()

    def read(self, number: int) -> None:
        """Wait for the tokens of a step, and pass them on."""
        with self._timed("wait"):
            if self._is_gpu:
                self._events[number % 2].synchronize()
        with self._timed("read"):
            for output, token in zip(self.outputs, self._landed[number % 2].tolist(), strict=True):
                output.append(token)


def in_turn(host: Host, steps: int) -> None:
    for number in range(steps):
        host.launch(number)
        host.read(number)


def ahead(host: Host, steps: int) -> None:
    host.launch(0)
    for number in range(1, steps):
        host.launch(number)
        host.read(number - 1)
    host.read(steps - 1)


Way = tuple[Callable[[Host, int], None], bool, Schedule]
WAYS: dict[str, Way] = {
    "serial": (in_turn, False, Serial()),
    "ahead": (ahead, False, Asynchronous(knows_ends=True)),
    "serial + device planner": (in_turn, True, Serial()),
    "ahead + device planner": (ahead, True, Asynchronous(knows_ends=True)),
}


def device_seconds(decoder: Decoder, steps: int) -> float:
    """Of a step whose host is never waited for."""
    decoder.reset()
    if not decoder.plans:  # one plan for all steps, of their mean length
        decoder.plan(np.full(decoder.shape.requests, decoder.shape.length + steps // 2))
    if not decoder.tokens.is_cuda:
        begin = time.perf_counter()
        for _ in range(steps):
            decoder.step()
        return (time.perf_counter() - begin) / steps
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begins.record()
    for _ in range(steps):
        decoder.step()
    ends.record()
    ends.synchronize()
    return begins.elapsed_time(ends) / steps / 1e3


def simulated_ms(schedule: Schedule, parts: dict[str, float], device: float, steps: int) -> float:
    """A step by the simulator, from the seconds of its parts."""
    costs = GivenCosts(
        (Section("step", "compute", device),),
        schedule=parts["launch"], plan=parts["plan"], output=parts["read"],
    )  # fmt: skip
    given = synthetic(1, prompt=2, output=steps, handed_over=True)
    return 1e3 * simulate(given, costs, schedule, limits=Limits(1, 1)).seconds / steps


def measure(report: ScheduleReport, shape: DecoderShape, ways: Sequence[str], rounds: int) -> None:
    """Rows of a model; the ways take turns, so that clocks and neighbours fall on all alike."""
    device = report.device
    weights = Weights(shape, device)
    decoders = {plans: Decoder(shape, weights, device, plans) for plans in (False, True)}
    hosts = {way: Host(decoders[WAYS[way][1]]) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    parts: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for number in range(rounds + 1):
        for way, host in hosts.items():
            host.begin()
            begin = time.perf_counter()
            WAYS[way][0](host, shape.steps)
            taken = time.perf_counter() - begin
            if number:  # the first is the warm-up
                times[way].append(1e3 * taken / shape.steps)
                for part, seconds in host.seconds.items():
                    parts[way].setdefault(part, []).extend(seconds)
    alone = {plans: device_seconds(one, shape.steps) for plans, one in decoders.items()}
    truths = {WAYS[way][1]: hosts[way].outputs for way in reversed(ways)}  # the first of each
    for way, host in hosts.items():
        _, plans, schedule = WAYS[way]
        means = {part: statistics.median(seconds) for part, seconds in parts[way].items()}
        params = {f"{part}_us": round(1e6 * seconds, 2) for part, seconds in means.items()}
        on_cpu = device.type == "cpu"  # where a launch is the step itself
        costs = means | ({"launch": 0.0} if on_cpu else {})
        simulated = simulated_ms(schedule, costs, alone[plans], shape.steps)
        params |= {
            "requests": shape.requests, "length": shape.length, "steps": shape.steps,
            "same_as_first": agreement(host.outputs, hosts[ways[0]].outputs),
            "device_ms": round(1e3 * alone[plans], 5), "simulated_ms": round(simulated, 5),
        }  # fmt: skip
        report.add(
            row(report.benchmark, shape, way, times[way], host.outputs == truths[plans], params)
        )


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of equal tokens: plans that cut keys elsewhere round differently."""
    return float(np.mean(np.array(one) == np.array(other)))


def row(
    benchmark: str, shape: DecoderShape, way: str, times: list[float], is_same: bool, params: Any
) -> Row:
    ordered = sorted(times)
    ms = statistics.median(ordered)
    found = Row(
        benchmark, f"{shape.name}, {shape.requests} requests", way, round(ms, 4), "ms",
        ms=round(ms, 5), ms_low=round(ordered[len(ordered) // 10], 5),
        ms_high=round(ordered[-1 - len(ordered) // 10], 5), samples=len(ordered), params=params,
    )  # fmt: skip
    return found if is_same else replace(found, value=None, note="wrong: other tokens")


class ScheduleReport(Report):
    """With the device at hand; rows of a CPU have a file of their own."""

    def __init__(self, options: Any) -> None:
        twin = "_cpu" if options.device.type == "cpu" else ""
        super().__init__(f"async_schedule{twin}", options.device, options.out)
        self.device = options.device


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    report = ScheduleReport(options)
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    ways = [way for way in WAYS if not wanted or way in wanted]
    on_gpu = options.device.type == "cuda"
    shapes = SHAPES[: 1 if options.quick else None] if on_gpu else (TINY,)
    with torch.inference_mode():
        for shape in shapes:
            measure(report, shape, ways, 2 if options.quick else 5)
    report.finish()


if __name__ == "__main__":
    main()
