"""Decode steps of small models: eagerly, by a graph pool, and by a graph for each batch size.

    python benchmarks/graph_pool.py [--quick] [--device cpu] [--models 0.5B 4B] [--out FOLDER]

A step plans attention and computes the next token of each request, in models that have the shapes
of Qwen2.5-0.5B and Qwen3-4B, random weights, and keys in pages of 16. Its time is the host's, from
the plan until the tokens are there, since the next step cannot begin before. Launches are those
that torch's profiler sees. Memory is what captures hold when all batch sizes up to the most are
served: shared pools, what each graph has of its own, and the pool's buffers. On a CPU the host's
twin takes the place of graphs, which tries the code and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Report, Row, placed
from rich.table import Table

import warploom as wl
from warploom.serving.graphs.driver import Capture, GraphDriver
from warploom.serving.graphs.pool import driver_of

PAGE, MIB = 16, 1 << 20
WAYS = ("eager", "pool, full", "pool, partial", "graph per size", "per size, one pool")
TOLERANCE = 3e-2  # of the largest logit, in bf16


@dataclass(frozen=True)
class Shape:
    """A dense decoder: sizes of its layers, and of the batches that it serves."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    most: int  # requests of a batch
    kv_len: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "0.5B": Shape("0.5B", 24, 896, 4864, 14, 2, 64, 151_936, 32, 1024),
    "4B": Shape("4B", 36, 2560, 9728, 32, 8, 128, 151_936, 32, 1024),
    "tiny": Shape("tiny", 2, 128, 256, 2, 1, 64, 512, 4, 40, torch.float32),
}


class Model:
    """The step of a decoder as pieces, and plans for its batches."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        heads, dim = shape.heads, shape.head_dim
        self.sizes = [heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
        self.table = self._weight(shape.vocabulary, shape.width)
        self.layers = [
            {
                "qkv": self._weight(shape.width, sum(self.sizes)),
                "out": self._weight(heads * dim, shape.width),
                "up": self._weight(shape.width, 2 * shape.inner),
                "down": self._weight(shape.inner, shape.width),
            }
            for _ in range(shape.layers)
        ]
        self.pages_each = -(-shape.kv_len // PAGE)
        pages = (shape.most * self.pages_each + 1, 2, PAGE, shape.kv_heads, dim)
        self.caches = [self._weight(*pages) for _ in range(shape.layers)]
        self.bounds = wl.Bounds(
            max_requests=shape.most + 1, max_q_rows=shape.most, max_kv_len=shape.kv_len,
            max_blocks=shape.most * self.pages_each,
        )  # fmt: skip
        self.attention = wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=heads, num_kv_heads=shape.kv_heads,
            head_dim=dim, dtype=shape.dtype, device=device, bounds=self.bounds, cuda_graph=True,
        )  # fmt: skip

    def _weight(self, *size: int) -> torch.Tensor:
        made = torch.empty(size, dtype=self.shape.dtype, device=self.device)
        return made.normal_(std=self.shape.width**-0.5)

    @property
    def pieces(self) -> list[Any]:
        """Attention of each layer, and what lies between."""
        found: list[Any] = [self._first]
        for number in range(self.shape.layers):
            found.append(wl.GraphPiece(partial(self._attend, number), "full"))
            found.append(partial(self._behind, number))
        return found

    @property
    def inputs(self) -> dict[str, wl.GraphInput]:
        spare = self.shape.most * self.pages_each  # a page that no request has
        return {
            "tokens": wl.GraphInput(torch.int64),
            "page": wl.GraphInput(torch.int64, pad=spare),
            "at": wl.GraphInput(torch.int64),
        }

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Tokens, and where their keys go: the last place of each request."""
        generator = torch.Generator().manual_seed(rows)
        tokens = torch.randint(0, self.shape.vocabulary, (rows,), generator=generator)
        page = (torch.arange(rows) + 1) * self.pages_each - 1
        at = torch.full((rows,), (self.shape.kv_len - 1) % PAGE)
        return {"tokens": tokens.to(self.device), "page": page.to(self.device),
                "at": at.to(self.device)}  # fmt: skip

    def plan(self, rows: int, padded: int) -> None:
        """Plan a batch; rows of padding are a request's that has no keys."""
        each, last = self.pages_each, (self.shape.kv_len - 1) % PAGE + 1
        q_ends, ends = [*range(rows + 1)], [*range(0, rows * each + 1, each)]
        lasts = [last] * rows
        if padded > rows:
            q_ends, ends, lasts = [*q_ends, padded], [*ends, ends[-1]], [*lasts, 0]
        pages = list(range(rows * each))
        self.attention.plan(q_ends, ends, kv_indices=pages, last_page_len=lasts)

    def step(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """The pieces, eagerly and without a pool."""
        flow: Any = self._first(inputs["tokens"])
        for number in range(self.shape.layers):
            q, k, v, x = flow
            attended = self._attend(number, q, k, v, x, inputs["page"], inputs["at"])
            flow = self._behind(number, *attended)
        return flow

    def _first(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._project(0, self.table[tokens])

    def _project(self, number: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = torch.split(normed(x) @ self.layers[number]["qkv"], self.sizes, 1)
        by_head = (len(x), -1, self.shape.head_dim)
        return q.reshape(by_head), k.reshape(by_head), v.reshape(by_head), x

    def _attend(self, number: int, q: Any, k: Any, v: Any, x: Any, page: Any, at: Any) -> Any:
        cache = self.caches[number]
        cache[:, 0].index_put_((page, at), k)
        cache[:, 1].index_put_((page, at), v)
        return self.attention.run(q, cache), x

    def _behind(self, number: int, attended: torch.Tensor, x: torch.Tensor) -> Any:
        layer = self.layers[number]
        x = x + attended.flatten(1) @ layer["out"]
        gate, up = (normed(x) @ layer["up"]).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["down"]
        if number + 1 < self.shape.layers:
            return self._project(number + 1, x)
        logits, tokens = (normed(x) @ self.table.T).max(1)
        return tokens, logits


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


class OneGraphPerSize:
    """What a pool is compared with: each batch size is captured alone.

    Intermediate results lie in memory of each capture's own, or all in that of one driver, as
    engines do that capture all sizes.
    """

    def __init__(self, model: Model, shared: GraphDriver | None = None) -> None:
        self._model, self._held = model, dict[int, tuple[GraphDriver, Capture, Any]]()
        self._shared = shared
        self._inputs = model.batch(model.shape.most)

    def capture(self, rows: int) -> None:
        inputs = {name: tensor[:rows] for name, tensor in self._inputs.items()}
        driver, given = self._shared or driver_of(self._model.device), list[Any]()

        def body() -> None:
            given.append(self._model.step(inputs))

        driver.rehearse(body)
        given.clear()
        capture = driver.capture(body, f"{rows} rows")
        self._held[rows] = driver, capture, given[0]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        rows = len(inputs["tokens"])
        for name, tensor in inputs.items():
            self._inputs[name][:rows].copy_(tensor)
        _, capture, outputs = self._held[rows]
        capture.replay()
        return outputs

    @property
    def num_bytes(self) -> int:
        drivers = {id(driver): driver for driver, _, _ in self._held.values()}
        held = sum(driver.shared_bytes for driver in drivers.values())
        held += sum(capture.own_bytes for _, capture, _ in self._held.values())
        return held + sum(x.numel() * x.itemsize for x in self._inputs.values())

    def close(self) -> None:
        for _, capture, _ in self._held.values():
            capture.close()
        self._held.clear()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def launches(call: Callable[[], object], device: torch.device) -> int:
    """Launches of kernels, copies and graphs that torch's profiler sees."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        synchronize(device)
    kinds = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
    return sum(str(event.name).startswith(kinds) for event in found.events() or ())


class Bench:
    """One model in all ways."""

    def __init__(self, report: Report, shape: Shape, device: torch.device, steps: int) -> None:
        self.report, self.shape, self.device, self.steps = report, shape, device, steps
        self.model = Model(shape, device)
        self.pools = {
            "pool, full": self._pool(None),
            "pool, partial": self._pool(0),
        }
        self.graphs = {
            "graph per size": OneGraphPerSize(self.model),
            "per size, one pool": OneGraphPerSize(self.model, driver_of(device)),
        }

    def _pool(self, full_rows: int | None) -> wl.GraphPool:
        model = self.model
        return wl.GraphPool(
            model.pieces, model.inputs, model.bounds, device=self.device, full_rows=full_rows
        )

    def run(self, sizes: Sequence[int]) -> None:
        self.model.attention.warm_up(progress=False)
        self._capture()
        for rows in sizes:
            self._steps(rows)

    def close(self) -> None:
        for held in (*self.pools.values(), *self.graphs.values()):
            held.close()

    def _capture(self) -> None:
        for way, pool in self.pools.items():
            begin = time.perf_counter()
            pool.warm_up(lambda rows: self.model.plan(rows, rows), progress=False)
            stats = pool.stats()
            held = stats.shared_bytes + stats.own_bytes + stats.buffer_bytes
            params = {"captures": stats.captures, "shared": stats.shared_bytes,
                      "own": stats.own_bytes, "buffers": stats.buffer_bytes}  # fmt: skip
            self._held(way, held, params, time.perf_counter() - begin)
        for way, graphs in self.graphs.items():
            begin = time.perf_counter()
            for rows in range(self.shape.most, 0, -1):
                self.model.plan(rows, rows)
                graphs.capture(rows)
            params = {"captures": self.shape.most}
            self._held(way, graphs.num_bytes, params, time.perf_counter() - begin)

    def _held(self, way: str, held: int, params: dict[str, Any], seconds: float) -> None:
        case, name = f"{self.shape.name}, memory", self.report.benchmark
        params = {**params, "bytes": held, "seconds": seconds, "most": self.shape.most}
        self.report.add(Row(name, case, way, held / MIB, "MiB", params=params))

    def _steps(self, rows: int) -> None:
        batch, model = self.model.batch(rows), self.model
        calls: dict[str, Callable[[], Any]] = {
            "eager": partial(self._step, model.step, batch, rows)
        }
        for way, pool in self.pools.items():
            calls[way] = partial(self._step, pool.run, batch, pool.choose(rows).padded_rows)
        for way, graphs in self.graphs.items():
            calls[way] = partial(self._step, graphs.run, batch, rows)
        truth = calls["eager"]()[1].float().clone()
        case, name = f"{self.shape.name}, {rows} rows", self.report.benchmark
        for way, call in calls.items():
            out = [call() for _ in range(3)][-1]
            error = float((out[1].float() - truth).abs().max() / truth.abs().max())
            times = sorted(timed(call, self.device) for _ in range(self.steps))
            ms = statistics.median(times)
            count = launches(call, self.device) if self.device.type == "cuda" else None
            is_right = error <= TOLERANCE
            note = "" if is_right else f"wrong: relative error {error:.2g}"
            params = {"rows": rows, "launches": count}
            self.report.add(
                Row(name, case, way, 1e3 * ms if is_right else None, "us", ms,
                    times[len(times) // 10], times[len(times) * 9 // 10], len(times),
                    error=error, note=note, params=params)
            )  # fmt: skip
            if count is not None:
                self.report.add(Row(name, case, way, count, "launches", params=params))

    def _step(self, run: Callable[..., Any], batch: dict[str, torch.Tensor], padded: int) -> Any:
        self.model.plan(len(batch["tokens"]), padded)
        return run(batch)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def summary(rows: Sequence[Row]) -> Table:
    """Time of a step and its launches, and memory of captures, a line for each case."""
    table = Table("case", *WAYS, "eager / pool", title="us a step (launches); MiB of captures")
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.impl: row for row in rows if row.case == case and row.unit != "launches"}
        cells = [cell_of(mine.get(way)) for way in WAYS]
        eager, pool = (mine[way].value if way in mine else None for way in ("eager", "pool, full"))
        table.add_row(case, *cells, f"{eager / pool:.2f}" if eager and pool else "")
    return table


def cell_of(row: Row | None) -> str:
    if row is None:
        return ""
    if row.value is None:
        return row.note
    count = row.params.get("launches")
    return f"{row.value:.4g}" + (f" ({count})" if count is not None else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time of a step by rows for each model, and the memory of captures."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.case.partition(",")[0] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(models), figsize=(4 * len(models) + 1, 6), squeeze=False, layout="constrained"
    )
    for name, ax, below in zip(models, *axes, strict=True):
        mine = [row for row in rows if row.case.partition(",")[0] == name]
        for color, way in enumerate(WAYS):
            own = [row for row in mine if row.impl == way and row.value is not None]
            steps = [row for row in own if row.unit == "us"]
            at = [row.params["rows"] for row in steps]
            ax.plot(at, [row.value for row in steps], f"C{color}o-", ms=3, label=way)
            held = [row.value or 0.0 for row in own if row.unit == "MiB"]
            below.barh([way] * len(held), held, color=f"C{color}")
        ax.set(title=name, xlabel="requests", ylabel="us a step", ylim=(0, None))
        ax.legend(fontsize=7)
        below.set(xlabel="MiB that captures hold")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes and steps")
    parser.add_argument("--models", nargs="+", choices=SHAPES, help="0.5B and 4B by default")
    options = placed(parser, argv)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    on_gpu = device.type == "cuda"
    report = Report("graph_pool" if on_gpu else "graph_pool_cpu", device, options.out)
    for name in options.models or (("0.5B", "4B") if on_gpu else ("tiny",)):
        shape = SHAPES[name]
        sizes = [n for n in (1, 3, 8, 20, 32) if n <= shape.most]
        with torch.inference_mode():
            bench = Bench(report, shape, device, steps=3 if options.quick else 30)
            bench.run(sizes[1::2] if options.quick else sizes)
            bench.close()
    report.console.print(summary(report.rows))
    draw(report.rows, options.out / f"{report.benchmark}.png")


if __name__ == "__main__":
    main()
