"""Time of planning typical batches, as tables and as JSON lines.

First `make_plan` and `Plan.pack`, which are NumPy; then, for decoding over a paged cache, the whole
`AttentionWrapper.plan` with the native planners: on the host, and as a kernel where there is a GPU.

Run: python benchmarks/plan_time.py [--out plan_time.jsonl] [--repeat 50] [--ctas 132]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import warploom as wl
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import SEGMENT, Ints, Records
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.capacity import capacity
from warploom.scheduler.plans.plan import Plan, make_plan

Lengths = npt.NDArray[np.int64]


class Causal(AllVisible):
    """Bottom-right causal mask: the keys up to a tile's last row."""

    def __init__(self, segments: Records, group_size: int) -> None:
        super().__init__(segments)
        self._group_size = group_size
        self._shift = segments["kv_len"].astype(np.int64) - segments["q_len"]

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        return segment * 0, (row_end - 1) // self._group_size + 1 + self._shift[segment]


@dataclass(frozen=True)
class Batch:
    """One row of the table."""

    name: str
    q_lens: Lengths
    kv_lens: Lengths
    num_kv_heads: int
    group_size: int
    rows: int
    keys: int = 64

    def segments(self) -> Records:
        segments = np.zeros(len(self.q_lens), SEGMENT.dtype)
        segments["batch"] = np.arange(len(self.q_lens))
        segments["q_row"] = np.cumsum(self.q_lens) - self.q_lens
        segments["num_q"] = segments["q_len"] = self.q_lens
        segments["kv_len"] = segments["kv_count"] = self.kv_lens
        return segments


@dataclass(frozen=True)
class Measurement:
    """Times in milliseconds."""

    batch: str
    requests: int
    items: int
    slots: int
    balance: float
    plan_ms: float
    plan_ms_best: float
    pack_ms: float
    num_ctas: int
    host: str
    numpy: str


def zipf(size: int, mean: int) -> Lengths:
    """Skewed lengths with the given mean."""
    lengths = np.minimum(np.random.default_rng(0).zipf(1.5, size), 200).astype(float)
    return np.maximum(1, lengths / lengths.mean() * mean).astype(np.int64)


def batches() -> list[Batch]:
    def full(size: int, value: int) -> Lengths:
        return np.full(size, value, np.int64)

    mixed = np.concatenate((full(16, 65_536), full(128, 300)))
    return [
        Batch("decode 1 x 65536", full(1, 1), full(1, 65_536), 8, 4, 16),
        Batch("decode 128 x 1024", full(128, 1), full(128, 1024), 8, 4, 16),
        Batch("decode 128, zipf 1024", full(128, 1), zipf(128, 1024), 8, 4, 16),
        Batch("decode 24 x 8192, levelled", full(24, 1), full(24, 8192), 8, 4, 16),
        Batch("decode 16 long, 128 short", full(144, 1), mixed, 8, 4, 16),
        Batch("decode 1024 x 1024", full(1024, 1), full(1024, 1024), 8, 4, 16),
        Batch("decode 1024, zipf 1024", full(1024, 1), zipf(1024, 1024), 8, 4, 16),
        Batch("prefill 16 x 16384", full(16, 16_384), full(16, 16_384), 16, 1, 128),
    ]


def timed(run: Callable[[], object], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(batch: Batch, num_ctas: int, repeat: int) -> Measurement:
    segments = batch.segments()
    mask = Causal(segments, batch.group_size)
    numbers: dict[str, Any] = {
        "rows": batch.rows,
        "keys": batch.keys,
        "num_kv_heads": batch.num_kv_heads,
        "group_size": batch.group_size,
        "num_ctas": num_ctas,
    }
    room = capacity(Bounds.of(segments), **numbers)

    problem = Problem(segments, active_ctas=num_ctas, visibility=mask, **numbers)

    def plan() -> Plan:
        return make_plan(problem)

    result = plan()
    buffer = result.pack(room)
    times = timed(plan, repeat)
    return Measurement(
        batch=batch.name,
        requests=len(segments),
        items=len(result.items),
        slots=result.num_slots,
        balance=round(result.balance, 4),
        plan_ms=round(statistics.median(times), 4),
        plan_ms_best=round(min(times), 4),
        pack_ms=round(statistics.median(timed(lambda: result.pack(room, buffer), repeat)), 4),
        num_ctas=num_ctas,
        host=platform.processor() or platform.machine(),
        numpy=np.__version__,
    )


@dataclass(frozen=True)
class WrapperMeasurement:
    """Medians in microseconds; the kernel's from replays of a CUDA graph, None without a GPU."""

    batch: str
    device: str
    items: int
    plan_us: float
    kernel_us: float | None


def page_table(kv_lens: Lengths, page: int) -> list[torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len of one query row for each request."""
    pages = np.append(0, np.cumsum(-(-kv_lens // page)))
    order = np.random.default_rng(0).permutation(int(pages[-1]))
    parts = np.arange(len(kv_lens) + 1), pages, order, (kv_lens - 1) % page + 1
    return [torch.from_numpy(part.astype(np.int32)) for part in parts]


def measure_wrapper(
    name: str, kv_lens: Lengths, device: torch.device, repeat: int
) -> WrapperMeasurement:
    lists = page_table(kv_lens, 16)
    requests = len(kv_lens)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(16), num_q_heads=32, num_kv_heads=8, head_dim=128,
        dtype="bfloat16", device=device, cuda_graph=True,
        bounds=Bounds(requests, requests, int(kv_lens.max()), len(lists[2])),
    )  # fmt: skip

    def plan() -> None:
        attention.plan(*lists)

    timed(plan, 10)
    times = timed(plan, repeat)
    planned = attention.planned
    assert planned is not None
    items = len(planned.plan.items)
    kernel = kernel_us(attention, [part.to(device) for part in lists], repeat)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return WrapperMeasurement(name, where, items, statistics.median(times) * 1e3, kernel)


def kernel_us(
    attention: wl.AttentionWrapper, lists: list[torch.Tensor], repeat: int
) -> float | None:
    """Time of the planner kernel, from graphs of many."""
    if attention.device.type != "cuda":
        return None
    attention.plan(*lists)
    attention.check_plan()
    graph, many = torch.cuda.CUDAGraph(), 50
    with torch.cuda.graph(graph):
        for _ in range(many):
            attention.plan(*lists)
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / many)
    median: float = statistics.median(times)
    return median


def measure_wrappers(repeat: int) -> list[WrapperMeasurement]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"\n{'AttentionWrapper.plan':28} {'items':>6} {'plan us':>8} {'kernel us':>10}")
    found = []
    for size in (128, 1024):
        for name, kv_lens in (
            (f"decode {size} x 1024", np.full(size, 1024, np.int64)),
            (f"decode {size}, zipf 1024", zipf(size, 1024)),
        ):
            row = measure_wrapper(name, kv_lens, device, repeat)
            kernel = "" if row.kernel_us is None else f"{row.kernel_us:10.1f}"
            print(f"{row.batch:28} {row.items:6} {row.plan_us:8.1f} {kernel}")
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--ctas", type=int, default=132)
    options = parser.parse_args()
    print(f"{'batch':28} {'items':>6} {'slots':>6} {'balance':>8} {'plan ms':>8} {'pack ms':>8}")
    for batch in batches():
        found = measure(batch, options.ctas, options.repeat)
        print(
            f"{found.batch:28} {found.items:6} {found.slots:6} {found.balance:8.3f} "
            f"{found.plan_ms:8.3f} {found.pack_ms:8.3f}"
        )
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    rows = measure_wrappers(options.repeat)
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
