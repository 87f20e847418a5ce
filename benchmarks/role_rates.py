"""What prefills compute and decodes read on some of the SMs, alone and beside each other.

    python benchmarks/role_rates.py [--quick] [--out FOLDER]
    python benchmarks/role_rates.py --fit [FILE]

Both halves run by the kernel of two roles: prefills of 2k rows over 8k keys on n SMs, and 64
decodes over 8k keys each on the others, heads 32/8, bf16, pages of 16. "Beside" are two graphs on
two streams that take about as long as each other. `--fit` needs no GPU: it tells what one SM of a
record computes and reads, how many SMs saturate the memory, and what the prices by which CTAs are
shared out (`role_cost.py`) say of the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from batches import Inputs, Shape, make_inputs
from harness import Report, Row, file_to_fit, load_rows, report_with_ceilings
from harness import placed as placed_arguments
from peers import planned
from rich.console import Console
from rich.table import Table

import warploom as wl
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.choice.role_cost import RoleCost, role_cost
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace

NAME = "role_rates"
HEADS, DIM, PAGE = (32, 8), 128, 16
PREFILL, DECODE = "prefill", "decode"
SMS = (8, 16, 33, 49, 66, 81, 99, 116, 124, 132)
GRAPH_MS = 8.0
REPLAYS = 5


def shapes() -> dict[str, Shape]:
    """Requests of each half."""
    sizes = {"dtype": torch.bfloat16, "page_size": PAGE}
    return {
        PREFILL: Shape((2048,) * 4, (8192,) * 4, *HEADS, DIM, **sizes),
        DECODE: Shape((1,) * 64, (8192,) * 64, *HEADS, DIM, **sizes),
    }


def tile_of_roles() -> tuple[AttentionSpec, TileConfig]:
    """The tiles of both roles that wrappers try first."""
    spec = AttentionSpec(trace(wl.Causal()), DIM, DIM, dtype("bfloat16"), wl.Paged(PAGE))
    return spec, role_choices(spec, arch_named("sm_90a"), HEADS[0] // HEADS[1])[0].tile


@dataclass
class Half:
    """A half on some SMs, as a graph of several calls on a stream of its own.

    Attributes:
        work: of one call, in TFLOP or GB.
        calls: in the graph.
    """

    run: Callable[[], object]
    work: float
    stream: torch.cuda.Stream
    calls: int = 1
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, inputs: Inputs, tile: TileConfig, sms: int) -> Half:
        shape = inputs.shape
        attention = planned(wl.Causal(), inputs, tile=tile, sm_limit=sms)
        work = shape.flops() / 1e12 if max(shape.q_lens) > 1 else shape.bytes / 1e9
        run = partial(attention.run, inputs.q, (inputs.k, inputs.v))
        return cls(run, work, torch.cuda.Stream())

    def capture(self, calls: int) -> None:
        """A graph of so many calls."""
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(calls):
                self.run()


def milliseconds(halves: Sequence[Half]) -> list[float]:
    """Medians of what their graphs take, replayed at the same time."""
    times: list[list[float]] = [[] for _ in halves]
    for _ in range(REPLAYS + 1):
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in halves]
        for half, (begin, end) in zip(halves, events, strict=True):
            assert half.graph is not None
            with torch.cuda.stream(half.stream):
                begin.record()
                half.graph.replay()
                end.record()
        torch.cuda.synchronize()
        for time, (begin, end) in zip(times, events, strict=True):
            time.append(begin.elapsed_time(end))
    return [statistics.median(time[1:]) for time in times]  # the first also uploads graphs


def row(half: Half, name: str, impl: str, sms: int, ms: float) -> Row:
    value = round(half.calls * half.work / (ms * 1e-3), 1)
    unit = "TFLOP/s" if name == PREFILL else "GB/s"
    params = {"role": name, "sms": sms, "calls": half.calls}
    return Row(NAME, f"{sms} SMs", f"{name} {impl}", value, unit, ms=round(ms, 4), params=params)


def calls_for(ms: float, ms_of_one: float) -> int:
    return max(1, round(ms / ms_of_one))


def measure(report: Report, inputs: dict[str, Inputs], sms: Sequence[int]) -> None:
    """Each half alone on n SMs, then decodes on n beside prefills on the others."""
    _, tile = tile_of_roles()
    most = max(sms)
    alone: dict[tuple[str, int], float] = {}
    needed = {*sms, *(most - n for n in sms if n < most)}
    for name in (PREFILL, DECODE):
        for n in sorted(needed):
            half = Half.of(inputs[name], tile, n)
            half.capture(1)
            half.capture(calls_for(GRAPH_MS, milliseconds([half])[0]))
            (ms,) = milliseconds([half])
            alone[name, n] = ms / half.calls
            report.add(row(half, name, "alone", n, ms))
    for n in (n for n in sms if n < most):
        on = {DECODE: n, PREFILL: most - n}
        halves = {name: Half.of(inputs[name], tile, count) for name, count in on.items()}
        for name, half in halves.items():
            half.capture(calls_for(GRAPH_MS, alone[name, on[name]]))
        for _ in range(2):  # until both end at about the same time
            times = milliseconds(list(halves.values()))
            for half, ms in zip(halves.values(), times, strict=True):
                half.capture(calls_for(GRAPH_MS, ms / half.calls))
        for (name, half), ms in zip(
            halves.items(), milliseconds(list(halves.values())), strict=True
        ):
            report.add(row(half, name, "beside", on[name], ms))


@dataclass(frozen=True)
class Rates:
    """What a record says of SMs.

    Attributes:
        tflops: of one SM that prefills, the least squares of all numbers of SMs.
        gbs: of one SM that decodes, of those numbers at which memory is not saturated.
        most_gbs: of all SMs that decode.
    """

    tflops: float
    gbs: float
    most_gbs: float

    @property
    def saturating(self) -> float:
        """SMs that decode as fast as memory lets all."""
        return self.most_gbs / self.gbs


UNSATURATED = 0.75  # of the most that is read


def rates(rows: Sequence[Row], impl: str) -> Rates:
    """Fit those of one way to run, "alone" or "beside"."""
    found = {
        name: {
            float(one.params["sms"]): one.value
            for one in rows
            if one.impl == f"{name} {impl}" and one.value is not None
        }
        for name in (PREFILL, DECODE)
    }
    most = max(found[DECODE].values())
    free = {n: value for n, value in found[DECODE].items() if value < UNSATURATED * most}
    return Rates(_slope(found[PREFILL]), _slope(free), most)


def _slope(values: dict[float, float]) -> float:
    """Of the line through 0 that is off by the least squares."""
    return sum(n * value for n, value in values.items()) / sum(n * n for n in values)


def priced() -> Rates:
    """What the prices say of the same tiles."""
    spec, tile = tile_of_roles()
    cost: RoleCost = role_cost(spec, tile)
    assert tile.decode is not None
    tflops = 2 * tile.rows * tile.keys * 2 * DIM / cost.prefill
    gbs = 1000 * tile.decode.keys * 2 * DIM * 2 / cost.decode
    return Rates(tflops, gbs, gbs * cost.saturating)


def fit(path: Path) -> None:
    machine, rows = load_rows(path)
    table = Table(title=f"One SM, {machine['device']}")
    for name in ("", "prefills, TFLOP/s", "decodes, GB/s", "all read, GB/s", "saturating SMs"):
        table.add_column(name, justify="right" if name else "left")
    told = {"alone": rates(rows, "alone"), "beside": rates(rows, "beside"), "prices": priced()}
    for name, of in told.items():
        table.add_row(
            name, f"{of.tflops:.2f}", f"{of.gbs:.1f}", f"{of.most_gbs:,.0f}", f"{of.saturating:.0f}"
        )
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer numbers of SMs")
    if (path := file_to_fit(parser, argv, NAME)) is not None:
        fit(path)
        return
    options = placed_arguments(parser, argv)
    report = report_with_ceilings(NAME, options)
    inputs = {name: make_inputs(shape, options.device) for name, shape in shapes().items()}
    measure(report, inputs, SMS[2::3] if options.quick else SMS)
    report.finish()


if __name__ == "__main__":
    main()
