"""Time implementations of one computation fairly, check them in the same run, keep every figure.

How a figure is made: the inputs are copied until they outgrow the L2 cache four times, one CUDA
graph calls the implementation on each copy in turn, and the median of the replays counts, so that
neither a warm cache nor launch gaps flatter anybody. Before it is timed, an implementation's output
is compared with float64 on sampled rows. What cannot run is written down with the reason instead of
a figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine_facts
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
MAX_COPIES = 16
MAX_GRAPH_PASSES = 32

Output = Any  # a tensor, or a tuple of parts; None stands for a part that is not computed
Thunk = Callable[[], Output]


class NotAvailable(Exception):
    """An implementation cannot run here; the text says why and lands in the table."""


class WrongReplay(Exception):
    """What is right when it is called is wrong when its graph is replayed."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: the median is over at least `replays` and `seconds` of replays.

    Graphs shorter than `graph_ms` are lengthened, for an event is only good to a few microseconds.
    """

    replays: int = 10
    seconds: float = 0.15
    max_replays: int = 300
    graph_ms: float = 2.0


QUICK = Effort(replays=5, seconds=0.05, max_replays=50)


@dataclass(frozen=True)
class Case:
    """One row of a table: what is computed, and how much work that is.

    Attributes:
        name: short label of the row.
        work: operations or bytes of one call, in units of 1e12 or 1e9 (see `unit`).
        unit: "TFLOP/s" or "GB/s"; or "us", and the figure is the time itself.
        input_bytes: size of one set of inputs; decides how many copies are rotated.
        params: shapes and types, kept with the figure.
    """

    name: str
    work: float
    unit: str
    input_bytes: int
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One figure, or the reason why there is none."""

    benchmark: str
    case: str
    impl: str
    value: float | None
    unit: str
    ms: float | None = None
    ms_low: float | None = None  # 10th percentile
    ms_high: float | None = None  # 90th percentile
    samples: int = 0
    copies: int = 0
    error: float | None = None  # relative error against float64, on sampled rows
    note: str = ""
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Compares an output with the truth: `relative_error(output)` must stay below `tolerance`.

    `of_replays` asks for the same of a replayed graph whose output was spoilt before: there are
    kernels that write nothing when they are replayed. Calls must then compute outputs anew.
    """

    relative_error: Callable[[Output], float]
    tolerance: float
    of_replays: bool = False


@dataclass(frozen=True)
class Implementation:
    """A contestant: `prepare(inputs)` makes one call for each copy of the inputs, or raises.

    One that is not `captured` is launched call by call, since no graph can hold it.
    """

    name: str
    prepare: Callable[[Sequence[Any]], Sequence[Thunk]]
    captured: bool = True


def copies_needed(case: Case, device: torch.device) -> int:
    """How many sets of inputs outgrow the last-level cache four times."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MAX_COPIES, -(-4 * cache // case.input_bytes)))


def replay_times(
    thunks: Sequence[Thunk], device: torch.device, effort: Effort, captured: bool = True,
    check: Check | None = None,
) -> list[float]:  # fmt: skip
    """Milliseconds of one call, once for each replay of all the calls.

    A check is asked about the first call's output of the last pass, after a replay.
    """

    def one_pass() -> Output:
        first = thunks[0]()
        for thunk in thunks[1:]:
            thunk()
        return first

    for _ in range(2):  # what is compiled or allocated on first use stays out of the figures
        one_pass()
    if device.type != "cuda":
        return _until(effort, lambda: _seconds(one_pass) * 1e3 / len(thunks))
    if not captured:
        return _until(effort, lambda: _event_ms(one_pass) / len(thunks))
    pass_ms = _event_ms(one_pass)
    passes = max(1, min(MAX_GRAPH_PASSES, round(effort.graph_ms / pass_ms)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes - 1):
            one_pass()
        output = one_pass()
    if check is not None:
        check_replay(check, output, graph.replay)
    graph.replay()
    calls = passes * len(thunks)
    return _until(effort, lambda: _event_ms(graph.replay) / calls)


def check_replay(check: Check, output: Output, replay: Callable[[], object]) -> None:
    """Spoil the output, replay, and compare; raises WrongReplay."""
    for part in output if isinstance(output, tuple) else (output,):
        if part is not None:
            part.fill_(torch.nan)
    replay()
    if not (error := check.relative_error(output)) <= check.tolerance:
        raise WrongReplay(f"relative error {error:.2e} when its graph is replayed")


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _event_ms(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _until(effort: Effort, once: Callable[[], float]) -> list[float]:
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < effort.max_replays and (
        len(times) < effort.replays or time.perf_counter() - begin < effort.seconds
    ):
        times.append(once())
    return times


def time_one(
    benchmark: str,
    case: Case,
    implementation: Implementation,
    inputs: Sequence[Any],
    check: Check,
    effort: Effort,
    device: torch.device,
) -> Row:
    """Check and time one implementation; any failure becomes a note, never a lost run."""
    blank = Row(benchmark, case.name, implementation.name, None, case.unit, params=case.params)
    try:
        thunks = implementation.prepare(inputs)
        error = check.relative_error(thunks[0]())
        if not error <= check.tolerance:  # NaN must not pass
            note = f"wrong: relative error {error:.2e} > {check.tolerance:.0e}"
            return Row(**{**asdict(blank), "note": note, "error": error})
        again = check if check.of_replays else None
        times = sorted(replay_times(thunks, device, effort, implementation.captured, again))
    except NotAvailable as reason:
        return Row(**{**asdict(blank), "note": f"n/a: {reason}"})
    except Exception as failure:  # a peer's failure must not end the run: it is the figure
        first = (str(failure).strip().splitlines() or [""])[0]
        return Row(**{**asdict(blank), "note": f"failed: {type(failure).__name__}: {first}"[:300]})
    median = statistics.median(times)
    return Row(
        benchmark, case.name, implementation.name, _figure(case, median), case.unit,
        ms=round(median, 5),
        ms_low=round(times[len(times) // 10], 5),
        ms_high=round(times[-1 - len(times) // 10], 5),
        samples=len(times),
        copies=len(thunks),
        error=float(f"{error:.3g}"),
        params=case.params,
    )  # fmt: skip


def _figure(case: Case, ms: float) -> float:
    return round(ms * 1e3 if case.unit == "us" else case.work / (ms * 1e-3), 2)


def matmul_ceiling(benchmark: str, device: torch.device, effort: Effort) -> Row:
    """What a large fp16 matrix product reaches: the ceiling of compute-bound attention."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.float16) for _ in range(2))
    times = replay_times([lambda: a @ b], device, effort)
    return _ceiling(benchmark, f"matmul {n}^3", 2 * n**3 / 1e12, "TFLOP/s", times)


def copy_ceiling(benchmark: str, device: torch.device, effort: Effort) -> Row:
    """What a large copy reaches here, bytes read plus bytes written: the ceiling of decode.

    No graph: a copy captured in one becomes a memcpy node, which an H200 runs at 2.8 TB/s, while
    the same copy on a stream reaches 4.2 TB/s. It takes 2 ms, so launch gaps do not matter.
    """
    size = (4 << 30) if device.type == "cuda" else (32 << 20)
    source = torch.randint(-(2**31), 2**31, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy()
    timed = _event_ms if device.type == "cuda" else lambda run: _seconds(run) * 1e3
    times = _until(effort, lambda: timed(copy))
    return _ceiling(benchmark, f"copy of {size >> 20} MiB", 2 * size / 1e9, "GB/s", times)


def read_ceiling(benchmark: str, device: torch.device, effort: Effort) -> Row:
    """What a large sum reaches here, bytes read: decode writes almost nothing."""
    size = (4 << 30) if device.type == "cuda" else (32 << 20)
    source = torch.randn(size // 4, device=device)
    times = replay_times([source.sum], device, effort)
    return _ceiling(benchmark, f"read of {size >> 20} MiB", size / 1e9, "GB/s", times)


def _ceiling(benchmark: str, what: str, work: float, unit: str, times: list[float]) -> Row:
    median = statistics.median(times)
    value = round(work / (median * 1e-3), 1)
    return Row(benchmark, "ceiling", what, value, unit, ms=round(median, 5), samples=len(times))


class Report:
    """Collects rows, shows them as they come, and writes them as JSON lines."""

    def __init__(self, benchmark: str, device: torch.device, folder: Path) -> None:
        self.benchmark = benchmark
        self.path = folder / f"{benchmark}.jsonl"
        self.facts = machine_facts(device)
        self.rows: list[Row] = []
        self.console = Console()
        self.console.print(f"{benchmark} on {self.facts['device']}, torch {torch.__version__}")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        shown = row.note if row.value is None else f"{cell(row):>8} {row.unit}"
        if row.ms is not None and row.value is not None:
            shown += f"  {row.ms:9.4f} ms"
        line = f"  {row.case:24} {row.impl:16} {shown}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self.write()  # after every row: a run that is cut short keeps what it has

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"benchmark": self.benchmark, "machine": self.facts}, *map(asdict, self.rows)]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def finish(self) -> None:
        self.console.print(rich_table(self.benchmark, self.rows))
        self.console.print(f"rows: {self.path}")


def pivot(rows: Sequence[Row]) -> tuple[list[str], list[str], dict[tuple[str, str], Row]]:
    """Cases, implementations (both in order of appearance) and the row of each pair."""
    measured = [row for row in rows if row.case != "ceiling"]
    cases = list(dict.fromkeys(row.case for row in measured))
    impls = list(dict.fromkeys(row.impl for row in measured))
    return cases, impls, {(row.case, row.impl): row for row in measured}


def cell(row: Row | None) -> str:
    """What a table shows for one figure."""
    if row is None:
        return ""
    if row.value is None:
        return row.note.partition(":")[0]
    return f"{row.value:.0f}" if abs(row.value) >= 100 else f"{row.value:.3g}"


def rich_table(benchmark: str, rows: Sequence[Row]) -> Table:
    cases, impls, at = pivot(rows)
    unit = next((row.unit for row in rows if row.case != "ceiling"), "")
    ceiling = next((row for row in rows if row.case == "ceiling" and row.unit == unit), None)
    limit = f"; ceiling {ceiling.value:.0f} ({ceiling.impl})" if ceiling and ceiling.value else ""
    table = Table("case", *impls, title=f"{benchmark}, {unit}{limit}")
    for case in cases:
        table.add_row(case, *(cell(at.get((case, impl))) for impl in impls))
    return table


def load_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Machine facts and rows of a results file."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return lines[0]["machine"], [Row(**line) for line in lines[1:]]


def arguments(
    description: str, argv: Sequence[str] | None = None, tables: Sequence[str] = ()
) -> argparse.Namespace:
    """The command line that every benchmark shares; `tables` are those to choose from."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter measurements")
    parser.add_argument("--only", default="", help="comma-separated implementations, e.g. warploom")
    if tables:
        parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    return placed(parser, argv)


def placed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What `parser` is asked, and where to run and to write: `device` and `out`."""
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(argv)
    options.device = torch.device(options.device)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: benchmarks time GPU kernels (--device cpu tries the code)")
    return options


def file_to_fit(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, benchmark: str
) -> Path | None:
    """The record that `--fit` names, by default the kept one; None if it is not asked for."""
    kept = RESULTS / f"{benchmark}.jsonl"
    parser.add_argument("--fit", nargs="?", type=Path, const=kept, help="no GPU; a record's file")
    asked: Path | None = parser.parse_known_args(argv)[0].fit
    return asked


def report_with_ceilings(benchmark: str, options: argparse.Namespace) -> Report:
    """A report that begins with what a matrix product and a copy reach in the same run."""
    report, device = Report(benchmark, options.device, options.out), options.device
    effort = QUICK if options.quick else Effort()
    report.add(matmul_ceiling(benchmark, device, effort))
    report.add(copy_ceiling(benchmark, device, effort))
    return report


def chosen(implementations: Sequence[Implementation], only: str) -> Iterator[Implementation]:
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    return (one for one in implementations if not wanted or one.name in wanted)
