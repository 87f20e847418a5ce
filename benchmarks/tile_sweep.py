"""Time every tile on batches of many kinds, to choose tiles by and to check the choice with.

    python benchmarks/tile_sweep.py [--small-heads] [--budget SECONDS] [--out FOLDER]

Paged causal attention, pages of 16, bf16, 8 key/value heads. Every case is timed with each tile
that it may get, and the outputs are compared with the first tile's. The rows go to
tile_sweep.jsonl, the smallest cases first; a run that its budget ends keeps what it has.

With --small-heads the heads have 64 and 32 lanes, for which Hopper has tiles of 128 and of 192
rows, and only tiles that the model of costs weighs are timed. The rows go to
tile_sweep_small_heads.jsonl, from which fit_tiles.py makes the model's rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Case, Effort, Row, copies_needed, placed, replay_times
from machine import machine_facts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import warploom as wl
from warploom.codegen.attention.template import MOST_TILES, SMALL_HEADS
from warploom.codegen.attention.templates import CPU
from warploom.codegen.build import build_all
from warploom.codegen.choice.tile_choice import every_tile, tiles_weighed
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.errors import WarploomError

NAME = "tile_sweep"
SMALL = f"{NAME}_small_heads"
KV_HEADS, PAGE = 8, 16
EFFORT = Effort(replays=3, seconds=0.01, max_replays=10, graph_ms=0.2)
TOLERANCE = 1e-2  # of the relative difference between two tiles' outputs, bf16
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024)
# around multiples of 128 and of 192, where tiles of one height are padded more than of the other
TALL_ROWS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Batch:
    """Equal requests.

    Attributes:
        rows: query rows of each.
        keys: of each.
        requests: how many.
        group_size: query heads of a key/value head.
        dim: of a head.
    """

    rows: int
    keys: int
    requests: int
    group_size: int
    dim: int

    @property
    def fused_rows(self) -> int:
        return self.rows * self.group_size

    @property
    def work(self) -> int:
        """Products, up to a factor."""
        return self.requests * self.fused_rows * self.keys * self.dim

    @property
    def kv_numbers(self) -> int:
        """Numbers of the keys alone, or of the values."""
        return self.requests * self.keys * KV_HEADS * self.dim

    @property
    def q_numbers(self) -> int:
        return self.requests * self.fused_rows * KV_HEADS * self.dim

    def __str__(self) -> str:
        return (
            f"{self.requests} x {self.rows} over {self.keys}, "
            f"{KV_HEADS * self.group_size}/{KV_HEADS}, head_dim {self.dim}"
        )


def batches(on_gpu: bool, small_heads: bool = False) -> list[Batch]:
    """The grid, head_dim 128 in full and others in part; the quickest first."""
    if small_heads:
        return sorted(batches_of_small_heads(on_gpu), key=lambda one: one.work)
    if not on_gpu:
        return [Batch(rows, 32, 2, 1, 16) for rows in (1, 20)]
    full = [
        Batch(rows, keys, requests, group_size, 128)
        for rows in ROWS
        for keys in (1024, 4096)
        for requests in (1, 16, 64)
        for group_size in (1, 4)
    ]
    part = [
        Batch(rows, 2048, requests, 4, 256)
        for rows in (1, 4, 8, 16, 32, 128, 1024)
        for requests in (1, 16, 64)
    ]
    return sorted(full + part, key=lambda one: one.work)


def batches_of_small_heads(on_gpu: bool) -> list[Batch]:
    if not on_gpu:
        return [Batch(rows, 32, 2, 1, dim) for dim in (32, 64) for rows in (1, 20)]
    tall = [
        Batch(rows, keys, requests, 1, 64)
        for rows in TALL_ROWS
        for keys, requests in ((2048, 1), (2048, 4), (1024, 16), (2048, 64), (8192, 8))
    ]
    smaller = [
        Batch(rows, 2048, requests, 1, 32) for rows in TALL_ROWS[::2] for requests in (4, 32)
    ]
    grouped = [
        Batch(rows, 2048, requests, 4, 64)
        for rows in (1, 4, 8, 16, 128)
        for requests in (1, 16, 64)
    ]
    return tall + smaller + grouped


class Memory:
    """Random numbers that all batches are cut from: making each batch's own would take longer."""

    def __init__(self, grid: Sequence[Batch], device: torch.device) -> None:
        self.device = device
        kv, q = max(one.kv_numbers for one in grid), max(one.q_numbers for one in grid)
        self._parts = [
            torch.randn(size, device=device, dtype=torch.bfloat16) for size in (q, kv, kv)
        ]
        self._out = torch.empty_like(self._parts[0])

    def copies(self, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
        """(q, k, v, out) for calls in turn, enough of them to outgrow the L2 cache."""
        size = 4 * (batch.kv_numbers + batch.q_numbers)
        count = copies_needed(Case(str(batch), 0.0, "us", size), self.device)
        rows = batch.requests * batch.rows, KV_HEADS * batch.group_size, batch.dim
        pages = batch.requests * batch.keys // PAGE, PAGE, KV_HEADS, batch.dim
        shapes = (rows, pages, pages, rows)
        memory = (*self._parts, self._out)
        return [
            tuple(_cut(part, i, shape) for part, shape in zip(memory, shapes, strict=True))
            for i in range(count)
        ]


def _cut(memory: torch.Tensor, i: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The i-th tensor of a shape; where memory ends, from its beginning again."""
    size = int(np.prod(shape))
    begin = i % (len(memory) // size) * size
    return memory[begin : begin + size].view(shape)


@cache
def wrapper(
    dim: int, group_size: int, device: torch.device, tile: TileConfig | None
) -> wl.AttentionWrapper:
    """One for all batches of these heads."""
    return wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Paged(PAGE),
        num_q_heads=KV_HEADS * group_size,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        dtype=torch.bfloat16,
        device=device,
        tile=tile,
    )


@cache
def tiles_of(dim: int, device: torch.device) -> list[TileConfig]:
    """Every tile that a batch with heads of this size may get; of small heads, those weighed."""
    any_tile = wrapper(dim, 1, device, None)
    if isinstance(any_tile.target, Arch):
        swept = every_tile if dim > SMALL_HEADS else tiles_weighed
        return swept(any_tile.spec, any_tile.target)
    return list(dict.fromkeys(CPU.choose(any_tile.spec, rows).tile for rows in (1, 48)))


def build(grid: Sequence[Batch], device: torch.device) -> None:
    """Compile all kernels in parallel. One that fails shows again where it is to be timed."""
    jobs = dict.fromkeys(  # most group sizes share their kernels
        job
        for dim, group_size in dict.fromkeys((one.dim, one.group_size) for one in grid)
        for job in wrapper(dim, group_size, device, None).build_jobs(
            [TileChoice(tile) for tile in tiles_of(dim, device)]
        )
    )
    try:
        build_all(list(jobs))
    except WarploomError as failure:
        print(str(failure)[:2000])


def plan(attention: wl.AttentionWrapper, batch: Batch) -> None:
    pages = batch.keys // PAGE
    scattered = np.random.default_rng(11).permutation(batch.requests * pages).astype(np.int32)
    starts = np.arange(batch.requests + 1, dtype=np.int32)
    last_page_len = np.full(batch.requests, PAGE, np.int32)
    attention.plan(starts * batch.rows, starts * pages, scattered, last_page_len)


def facts(attention: wl.AttentionWrapper) -> dict[str, Any]:
    """The tile and its kernel, to keep beside the figure."""
    assert attention.planned is not None
    kernel = attention.planned.kernel
    used = kernel.artifact.resources
    return {
        "tile": asdict(kernel.tile),
        "num_ctas": kernel.num_ctas,
        "registers": used.registers if used else None,
        "spill_bytes": used.spill_bytes if used else None,
    }


class Comparison:
    """Outputs of the tiles of one batch, beside the first one's."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None

    def __call__(self, out: torch.Tensor) -> float:
        if self._first is None:
            self._first = out.clone()
        first = self._first.float()
        return float((out.float() - first).norm() / first.norm())


def time_tile(
    batch: Batch, tile: TileConfig, memory: Memory, differs: Callable[[torch.Tensor], float]
) -> Row:
    """One row; a failure is written down and ends no run."""
    device, params = memory.device, asdict(batch) | {"fused_rows": batch.fused_rows}
    row = partial(Row, NAME, str(batch), tile.label, unit="us")
    try:
        attention = wrapper(batch.dim, batch.group_size, device, tile)
        plan(attention, batch)
        params |= facts(attention)
        copies = memory.copies(batch)
        calls = [partial(attention.run, q, (k, v), out=out) for q, k, v, out in copies]
        copies[0][-1].fill_(torch.nan)
        error = differs(calls[0]())
        if not error <= TOLERANCE:
            return row(None, note=f"wrong: relative difference {error:.2e}", params=params)
        times = sorted(replay_times(calls, device, EFFORT))
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        return row(None, note=f"failed: {type(failure).__name__}: {first}"[:300], params=params)
    median = statistics.median(times)
    return row(
        round(median * 1e3, 2), ms=round(median, 6), ms_low=round(times[0], 6),
        ms_high=round(times[-1], 6), samples=len(times), copies=len(calls),
        error=float(f"{error:.3g}"), params=params,
    )  # fmt: skip


def sweep(grid: Sequence[Batch], device: torch.device, path: Path, end: float) -> None:
    """Time batches until the clock reaches `end`; rows are written batch by batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("timing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    build(grid, device)
    memory = Memory(grid, device)
    with path.open("w") as file, Progress(*columns, console=Console(stderr=True)) as bar:
        file.write(json.dumps({"benchmark": path.stem, "machine": machine_facts(device)}) + "\n")
        task = bar.add_task("", total=len(grid))
        for done, batch in enumerate(grid):
            if time.monotonic() > end:
                bar.console.print(f"the budget ended the sweep after {done} of {len(grid)} batches")
                break
            rows = time_batch(batch, memory, end)
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
            file.flush()
            for row in rows:
                if row.note:
                    bar.console.print(f"{row.case}, {row.impl}: {row.note}", markup=False)
            bar.update(task, advance=1, description=best(rows))


def time_batch(batch: Batch, memory: Memory, end: float) -> list[Row]:
    """A row for each tile, or none at all if the clock reaches `end` before."""
    differs, rows = Comparison(), []
    for tile in tiles_of(batch.dim, memory.device):
        if batch.fused_rows <= MOST_TILES * tile.rows:
            rows.append(time_tile(batch, tile, memory, differs))
        if time.monotonic() > end:
            return []
    return rows


def best(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row.value is not None]
    if not timed:
        return ""
    first = min(timed, key=lambda row: row.value or 0.0)
    return f"{first.case}: {first.impl}, {first.value} us"


def main(argv: Sequence[str] | None = None) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small-heads", action="store_true", help="heads of 64 and 32 lanes")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds, compiling included")
    options = placed(parser, argv)
    device = options.device
    torch.manual_seed(0)
    path = options.out / f"{SMALL if options.small_heads else NAME}.jsonl"
    grid = batches(device.type == "cuda", options.small_heads)
    sweep(grid, device, path, begin + options.budget)
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
