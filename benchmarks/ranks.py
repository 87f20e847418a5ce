"""Processes of one benchmark, a GPU each, and times that all of them agree on."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RESULTS, Report, Row

Call = Callable[[], Any]


@dataclass(frozen=True)
class Rank:
    """One process of the group; without GPUs the group is gloo's, and nothing is captured."""

    rank: int
    world: int
    device: torch.device

    def table(self, benchmark: str) -> str:
        """The name of a table: there is one for each number of ranks."""
        return f"{benchmark}_{self.world}"

    def report(self, benchmark: str, out: Path, rows: Iterable[Row]) -> Report | None:
        """Work through rows; the first rank shows and writes them, and returns the report."""
        report = Report(self.table(benchmark), self.device, out) if self.rank == 0 else None
        for row in rows:
            if report:
                report.add(row)
        if report:
            report.finish()
        return report

    def captured(self, call: Call) -> tuple[Call, Any]:
        """A replay of a call, and what it writes. Call it once before: ranks connect then."""
        if self.device.type != "cuda":
            return call, call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        return graph.replay, out

    def times(self, call: Call, count: int) -> list[float]:
        """Seconds of a call, `count` of them; each is the slowest rank's, which all begin together.

        A count, and no time to fill: ranks that went by their own clocks would not agree on it.
        """
        token = torch.zeros(1, device=self.device)
        found = []
        for _ in range(count):
            dist.all_reduce(token)  # in front of the call on the stream: nobody begins earlier
            found.append(self._one(call))
        return self.most(found)

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest that any rank has of each; what is no number is infinite."""
        told = torch.tensor(values, dtype=torch.float64, device=self.device)
        told.nan_to_num_(torch.inf)  # backends may pass over it
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [float(x) for x in told]

    def _one(self, call: Call) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    def agree(self, is_right: bool) -> bool:
        """Whether all ranks say so."""
        told = torch.tensor([int(is_right)], device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told)


def arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What a parser is asked, and what all benchmarks of ranks are: `device` is for `on_ranks`."""
    parser.add_argument("--world", type=int, default=2, help="ranks, a GPU each")
    parser.add_argument("--quick", action="store_true", help="fewer cases, few replays")
    parser.add_argument("--tiny", action="store_true", help="small shapes, over gloo on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(argv)
    options.device = "cpu" if options.tiny else "cuda"
    if not options.tiny and torch.cuda.device_count() < options.world:
        parser.error(f"needs {options.world} GPUs (--tiny tries the code on the CPU)")
    return options


def on_ranks(work: Callable[..., None], world: int, device: str, *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in `world` new processes.

    Args:
        work: a function of a module, since processes import it.
        device: "cuda" (NCCL, GPU i for rank i) or "cpu" (gloo).
    """
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        given = (world, device, str(Path(folder) / "meeting"), work, arguments)
        processes.spawn(_begin, given, nprocs=world)  # type: ignore[no-untyped-call]


def _begin(
    rank: int, world: int, device: str, meeting: str, work: Callable[..., None],
    arguments: Sequence[Any],
) -> None:  # fmt: skip
    place = torch.device(device)
    options: dict[str, Any] = {}
    if place.type == "cuda":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
        options = {"device_id": place}
    else:
        torch.set_num_threads(1)
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{meeting}", world_size=world, rank=rank, **options)
    work(Rank(rank, world, place), *arguments)
    dist.destroy_process_group()


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, tenth and ninetieth percentile."""
    times = sorted(times)
    return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]
