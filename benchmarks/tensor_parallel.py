"""A decoder of tensor parallelism over NCCL, with prefetches beside its all-reduces, and without.

    python benchmarks/tensor_parallel.py [--world 2] [--quick] [--captures 5] [--out FOLDER]
    python benchmarks/tensor_parallel.py --tiny          # small, gloo, on the CPU

Some layers of a decoder, a GPU for each rank: products, attention over pages, two all-reduces. In
a CUDA graph, so that nothing waits for the host; a figure is the time of one layer, on the slowest
rank. Beside the all-reduce behind attention the weights of the MLP are prefetched, beside that
behind the MLP those of the next layer's attention. What comes of it must be the same bits. A budget
holds for either; "stand-in's choice" is what the constants say that were fitted beside a stand-in,
for the all-reduce as it was timed alone. Figures come from several graphs, taken in turn, since one
in ten is off in all of its replays. At the end stands what a prefetch costs each collective here,
whatever it brings: `Overlap.fixed`.

With slices of 70B as one of eight ranks has them, the group is smaller than the model's: its
collectives are those of `--world` GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, pstdev

import torch
import torch.distributed as dist
from batches import page_table
from harness import Row
from ranks import Rank, arguments, on_ranks, quantiles
from torch.nn.functional import linear, rms_norm, silu

import warploom as wl
from warploom.prefetch import H100_OVERLAP, H200_OVERLAP, ModelShape, Overlap, beside
from warploom.serving.prefetch.model_shapes import LLAMA3_8B, LLAMA3_70B

NAME = "tensor_parallel"
BUDGETS = (2, 4, 8, 16, 24)  # MB
SMS, PAGE, MB = 8, 16, 10**6
STAND_IN = "stand-in's choice"


@dataclass(frozen=True)
class Shape:
    """What one rank has of a model that so many devices share, and the batch that it decodes."""

    name: str
    model: ModelShape
    devices: int
    requests: int
    tokens: int
    layers: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def case(self) -> str:
        return f"{self.name}, {self.requests} x {self.tokens}"

    @property
    def q_heads(self) -> int:
        return self.model.heads // self.devices

    @property
    def kv_heads(self) -> int:
        return max(1, self.model.kv_heads // self.devices)

    @property
    def ffn(self) -> int:
        return self.model.ffn // self.devices

    @property
    def read(self) -> tuple[float, float]:
        """Bytes of weights behind attention, those of the MLP, and behind the MLP."""
        size = self.dtype.itemsize
        mlp = self.model.mlp(self.devices, self.requests, size)
        attention = self.model.attention(self.devices, self.requests, 0, 0, size)
        return sum(one.bytes for one in mlp), sum(one.bytes for one in attention)


def shapes(world: int, tiny: bool) -> Iterator[Shape]:
    if tiny:
        model = ModelShape("tiny", 2, 64, 4, 2, 192, head_dim=32)
        yield Shape("tiny", model, 2, 2, 40, 2, torch.float32)
        return
    for requests, tokens in ((8, 4096), (64, 1024)):
        yield Shape(f"8B/TP{world}", LLAMA3_8B, world, requests, tokens)
        yield Shape("70B, slices of TP8", LLAMA3_70B, 8, requests, tokens)


@dataclass(frozen=True)
class Layer:
    """Weights and pages of one layer."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    cache: torch.Tensor


@dataclass(frozen=True)
class Budgets:
    """Bytes to prefetch behind attention, for the MLP, and behind the MLP."""

    name: str
    mlp: int = 0
    attention: int = 0


@dataclass
class Decoder:
    """Layers on one rank, and a step through all of them."""

    shape: Shape
    rank: Rank
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        at, device = self.shape, self.rank.device
        dim, hidden = at.model.head_dim, at.model.hidden
        torch.manual_seed(self.rank.rank)
        self.attention = wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=at.q_heads,
            num_kv_heads=at.kv_heads, head_dim=dim, dtype=at.dtype, device=device,
        )  # fmt: skip
        indptr, indices, last = page_table((at.tokens,) * at.requests, PAGE)
        self.attention.plan(list(range(at.requests + 1)), indptr, indices, last)

        def make(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device, dtype=at.dtype) / sizes[-1] ** 0.5

        heads = at.q_heads + 2 * at.kv_heads
        for _ in range(at.layers):
            self.layers.append(Layer(
                make(heads * dim, hidden), make(hidden, at.q_heads * dim),
                make(2 * at.ffn, hidden), make(hidden, at.ffn),
                make(len(indices), 2, PAGE, at.kv_heads, dim),
            ))  # fmt: skip
        self.x = torch.randn(at.requests, hidden, device=device, dtype=at.dtype)
        dist.broadcast(self.x, 0)

    def step(self, given: Budgets) -> torch.Tensor:
        at, x = self.shape, self.x
        for i, layer in enumerate(self.layers):
            qkv = linear(self._norm(x), layer.qkv).unflatten(-1, (-1, at.model.head_dim))
            q = qkv[:, : at.q_heads].contiguous()
            y = linear(self.attention.run(q, layer.cache).flatten(1), layer.out)
            x = x + self._summed(y, [layer.up, layer.down], given.mlp)
            gate, up = linear(self._norm(x), layer.up).chunk(2, -1)
            y = linear(silu(gate) * up, layer.down)
            behind = self.layers[(i + 1) % len(self.layers)]
            x = x + self._summed(y, [behind.qkv, behind.out], given.attention)
        return x

    def all_reduces(self) -> torch.Tensor:
        """Those of a step alone."""
        y = self.x.clone()
        for _ in range(2 * len(self.layers)):
            dist.all_reduce(y)
        return y

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],))

    def _summed(self, y: torch.Tensor, then: list[torch.Tensor], budget: int) -> torch.Tensor:
        with beside(then, budget, sms=SMS) if budget else nullcontext():
            dist.all_reduce(y)
        return y


def chosen(shape: Shape, model: Overlap, seconds: float) -> Budgets:
    """What constants that were fitted beside a stand-in say of a collective of so many seconds."""
    return Budgets(STAND_IN, *(model.best_bytes(seconds, size, SMS) for size in shape.read))


def fixed_costs(rows: Sequence[Row], world: int, model: Overlap) -> list[float]:
    """Seconds that each step's prefetches cost a collective, whatever they brought.

    It is what `model` says that they save without `fixed`, less what they saved.
    """
    free = replace(model, fixed=0.0)
    shapes_of = {shape.case: shape for shape in shapes(world, False)}
    none = {row.case: row.value for row in rows if row.impl == "none"}
    found = []
    for row in rows:
        without = none.get(row.case)
        if not row.impl.endswith(" MB") or row.value is None or without is None:
            continue
        shape, seconds = shapes_of[row.case], 1e-6 * row.params["all_reduce_us"]
        asked = row.params["budget_mlp"], row.params["budget_attention"]
        told = sum(free.saved(seconds, *x, SMS) for x in zip(shape.read, asked, strict=True))
        found.append((told - 1e-6 * (without - row.value)) / 2)
    return found


def model_here() -> Overlap:
    """Constants of the current GPU; where there is none, of any."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return H200_OVERLAP if "H200" in name else H100_OVERLAP


def measure(rank: Rank, shape: Shape, captures: int, replays: int) -> list[Row]:
    """Rows of one shape: all-reduces alone, then steps by budget."""
    decoder = Decoder(shape, rank)
    name, count = rank.table(NAME), 2 * shape.layers
    decoder.all_reduces()
    replay, _ = rank.captured(decoder.all_reduces)
    alone, low, high = (x / count for x in quantiles(rank.times(replay, replays)))
    params = {
        "world": rank.world, "layers": shape.layers, "requests": shape.requests,
        "tokens": shape.tokens, "all_reduce_us": 1e6 * alone, "captures": captures,
    }  # fmt: skip
    rows = [Row(name, shape.case, "an all-reduce alone", round(1e6 * alone, 2), "us", 1e3 * alone,
                1e3 * low, 1e3 * high, replays, params=params)]  # fmt: skip
    fixed = [Budgets(f"{n} MB", n * MB, n * MB) for n in BUDGETS]
    settings = [Budgets("none"), *fixed, chosen(shape, model_here(), alone)]
    expected = decoder.step(settings[0]).clone()
    for at in settings:
        decoder.step(at)  # makes the tables that a graph reads
    times: dict[Budgets, list[float]] = {at: [] for at in settings}
    right = dict.fromkeys(settings, True)
    for _ in range(captures):
        for at in settings:
            replay, out = rank.captured(partial(decoder.step, at))
            replay()
            right[at] &= torch.equal(out, expected)
            times[at] += rank.times(replay, replays)
    for at in settings:
        own = params | {"budget_mlp": at.mlp, "budget_attention": at.attention}
        if not rank.agree(right[at]):
            rows.append(Row(name, shape.case, at.name, None, "us", note="wrong: other bits",
                            params=own))  # fmt: skip
            continue
        mid, low, high = (1e3 * x / shape.layers for x in quantiles(times[at]))
        rows.append(Row(name, shape.case, at.name, round(1e3 * mid, 2), "us", mid, low, high,
                        len(times[at]), params=own))  # fmt: skip
    return rows


def work(rank: Rank, tiny: bool, captures: int, replays: int, out: Path) -> None:
    with torch.no_grad():
        rows = (measure(rank, shape, captures, replays) for shape in shapes(rank.world, tiny))
        report = rank.report(NAME, out, chain.from_iterable(rows))
    if report and not tiny and (costs := fixed_costs(report.rows, rank.world, model_here())):
        usual = median(costs)
        told = f"{1e6 * usual:.2f} us, off by {1e6 * pstdev(costs, usual):.2f}"
        report.console.print(f"A prefetch costs a collective {told}, whatever it brings.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--captures", type=int, default=5, help="graphs for each figure")
    options = arguments(parser, argv)
    captures, replays = (2, 10) if options.quick or options.tiny else (options.captures, 40)
    given = options.tiny, captures, replays, options.out
    on_ranks(work, options.world, options.device, *given)


if __name__ == "__main__":
    main()
