"""What each way to transform keys costs: in attention by three kinds of warps, before, at append.

    python benchmarks/key_transforms.py [--limit SECONDS] [--only before,stored] [--build]

Ways: "consumers" transform staged tiles themselves; "group": warps of their own; "turned": the
same with sines from other rows; "fused": decode, where tiles of few rows have one way; "before": a
kernel before attention; "stored": keys lie transformed, as an append leaves them; "plain": nothing
is transformed at all. bf16, keys one request after another. The most important cases come first,
and a run that its limit ends keeps what it has. --build compiles all kernels for sm_90a, with
--device cpu where there is no GPU, so that a run with the same cache compiles none.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from unittest import mock

import torch
from batches import Inputs, Shape, Truth, label, make_inputs
from harness import (
    Case,
    Effort,
    Implementation,
    Report,
    Thunk,
    chosen,
    copies_needed,
    placed,
    time_one,
)
from peers import planned
from prefill_variants import ROPE_BASE, rope_angles, rope_truth
from tables import CEILINGS

import warploom as wl
from warploom.codegen.attention import templates
from warploom.codegen.attention.hopper import Hopper
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.lowering.specialize import for_pretransformed_keys
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.runtime.launching.pretransformed_keys import Way

NAME = "key_transforms"
WAYS = ("turned", "group", "consumers", "fused", "before", "stored", "plain")
ARCH, SMS = ARCHS["sm_90a"], 132
EFFORT = Effort(replays=5, seconds=0.04, max_replays=50, graph_ms=1.0)
TOLERANCE = 1e-2  # bf16; a key that is not transformed, or twice, is far above it
EPS = 1e-6


class StoredRope(wl.Rope):
    """Rotates queries alone."""

    key_transform = wl.Variant.key_transform


class StoredNorm(wl.QKNorm):
    """Normalises queries alone."""

    key_transform = wl.Variant.key_transform


def pairs_truth(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """RoPE of lanes 2 i and 2 i + 1, float64."""
    angle = rope_angles(position, x.shape[-1])[:, : x.shape[-1] // 2]
    even, odd = x[:, ::2], x[:, 1::2]
    turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
    return torch.stack(turned, -1).flatten(1)


def norm_truth(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)


def norm(kind: type[wl.QKNorm], dim: int, device: torch.device) -> wl.Variant:
    ones = torch.ones(dim, device=device)
    return kind(ones, ones, EPS) if kind is wl.QKNorm else kind(ones, eps=EPS)


@dataclass(frozen=True)
class Transform:
    """A transform of queries and keys.

    Attributes:
        whole: (head_dim, device) -> the variant.
        stored: the same without its part for keys.
        truth: (vectors, positions) -> vectors, float64.
        turns: whether sines can come from other rows.
    """

    whole: Callable[[int, torch.device], wl.Variant]
    stored: Callable[[int, torch.device], wl.Variant]
    truth: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    turns: bool


def rope(kind: type[wl.Rope], interleaved: bool, dim: int, device: torch.device) -> wl.Variant:
    return kind(ROPE_BASE, interleaved=interleaved)


TRANSFORMS = {
    "RoPE": Transform(
        partial(rope, wl.Rope, False), partial(rope, StoredRope, False), rope_truth, turns=True
    ),
    "QK norm": Transform(partial(norm, wl.QKNorm), partial(norm, StoredNorm), norm_truth, False),
    "RoPE pairs": Transform(
        partial(rope, wl.Rope, True), partial(rope, StoredRope, True), pairs_truth, turns=True
    ),
}


@contextmanager
def kernels_of(way: str) -> Iterator[None]:
    """Kernels that are made meanwhile transform staged tiles in one way."""
    made = {"group": Hopper("group"), "consumers": Hopper("consumers")}.get(way, HOPPER)
    others = tuple(made if one is HOPPER else one for one in templates.CUDA)
    with mock.patch.object(templates, "CUDA", others):
        yield


def asked(way: str) -> Way:
    """Where a wrapper transforms keys."""
    return "before" if way == "before" else "fused"


@dataclass(frozen=True)
class Contest:
    """One batch and one transform (None: plain attention)."""

    shape: Shape
    transform: str | None

    @property
    def is_decode(self) -> bool:
        return max(self.shape.q_lens) == 1

    @property
    def ways(self) -> tuple[str, ...]:
        if self.transform is None:
            return ("plain",)
        if self.is_decode:
            return ("fused", "before", "stored")
        turned = ("turned",) if TRANSFORMS[self.transform].turns else ()
        return (*turned, "group", "consumers", "before", "stored")

    def variant(self, way: str, device: torch.device) -> wl.Variant:
        if self.transform is None:
            return wl.Causal()
        made = TRANSFORMS[self.transform]
        part = made.stored if way == "stored" else made.whole
        return wl.Causal() & part(self.shape.dim, device)

    def tile(self, way: str) -> TileConfig:
        """What plans of an H100 or H200 choose for the batch, in one way."""
        shape = self.shape
        traced = trace(self.variant(way, torch.device("cpu")))
        spec = AttentionSpec(traced, shape.dim, shape.dim, bfloat16, wl.Ragged())
        if way == "before":
            spec = for_pretransformed_keys(spec)
        rows = sum(shape.q_lens) / shape.batch * shape.q_heads / shape.kv_heads
        share, keys = shape.batch * shape.kv_heads / SMS, sum(shape.kv_lens) // shape.batch
        return choose_tile(spec, ARCH, rows, share, keys).tile

    def case(self) -> Case:
        shape, what = self.shape, self.transform or "plain"
        name = f"{what}, {shape.batch} x {label(shape.kv_lens[0])}, {shape.q_heads}/"
        name += f"{shape.kv_heads}, dim {shape.dim}"
        if shape.q_lens != shape.kv_lens and not self.is_decode:
            name += f", {shape.q_lens[0]} queries"
        unit = "GB/s" if self.is_decode else "TFLOP/s"
        work = shape.bytes / 1e9 if self.is_decode else shape.flops() / 1e12
        return Case(name, work, unit, shape.bytes, shape.describe())

    def truth(self, way: str) -> Truth:
        if self.transform is None:
            return Truth(tolerance=TOLERANCE)
        rotate = TRANSFORMS[self.transform].truth
        return Truth(rotate=rotate, rotates_keys=way != "stored", tolerance=TOLERANCE)


def even(batch: int, q_len: int, kv_len: int, heads: tuple[int, int], dim: int) -> Shape:
    return Shape((q_len,) * batch, (kv_len,) * batch, *heads, dim, torch.bfloat16)


def contests(on_gpu: bool) -> Iterator[Contest]:
    """The most important first: heads of 128, then RoPE, then long batches."""
    kinds = ("RoPE", None, "QK norm", "RoPE pairs")
    if not on_gpu:
        for kind in kinds:
            yield Contest(even(2, 20, 40, (4, 2), 64), kind)
            yield Contest(even(2, 1, 40, (4, 2), 64), kind)
        return
    for dim in (128, 64):
        prefill = [
            even(2, 8192, 8192, (32, 8), dim),
            even(1, 512, 32768, (32, 8), dim),
            even(8, 2048, 2048, (32, 8), dim),
        ]
        decode = [
            even(batch, 1, keys, heads, dim)
            for heads in ((64, 8), (32, 32))
            for batch, keys in ((64, 16384), (16, 4096), (16, 16384), (64, 4096))
        ]
        for shapes in (prefill + decode[:2], decode[2:4] + decode[4:]):
            for kind in kinds:
                yield from (Contest(shape, kind) for shape in shapes)


def run_way(contest: Contest, way: str, inputs: Sequence[Inputs]) -> list[Thunk]:
    device = inputs[0].q.device
    tile = contest.tile(way) if device.type == "cuda" else None
    with kernels_of(way):
        attention = planned(
            contest.variant(way, device), inputs[0], tile=tile, key_transform=asked(way)
        )
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def measure(contest: Contest, only: str, report: Report, device: torch.device, end: float) -> None:
    """A row for each way, until the clock reaches `end`."""
    torch.manual_seed(0)
    case = contest.case()
    inputs = [make_inputs(contest.shape, device) for _ in range(copies_needed(case, device))]
    ways = contest.ways if device.type == "cuda" else tuple(
        dict.fromkeys("stored" if way == "stored" else "plain" if way == "plain" else "fused"
                      for way in contest.ways)
    )  # fmt: skip
    contestants = [Implementation(way, partial(run_way, contest, way)) for way in ways]
    for one in chosen(contestants, only):
        if time.monotonic() > end:
            break
        check = contest.truth(one.name).check(inputs[0])
        if device.type == "cuda":
            tile = asdict(contest.tile(one.name))
            timed = replace(case, params={**case.params, "tile": tile})
        else:
            timed = case
        report.add(time_one(NAME, timed, one, inputs, check, EFFORT, device))
    del inputs
    gc.collect()
    torch.cuda.empty_cache()


def declarations(only: str) -> list[wl.AttentionDeclaration]:
    """Of all that a GPU is asked for in one way."""
    cpu = torch.device("cpu")
    made = {
        (contest.transform, contest.shape.dim, contest.shape.q_heads // contest.shape.kv_heads,
         contest.tile(only)): contest
        for contest in contests(on_gpu=True) if only in contest.ways
    }  # fmt: skip
    return [
        wl.AttentionDeclaration(
            contest.variant(only, cpu), kv_format=wl.Ragged(), num_q_heads=contest.shape.q_heads,
            num_kv_heads=contest.shape.kv_heads, head_dim=contest.shape.dim, dtype="bfloat16",
            tile=contest.tile(only), key_transform=asked(only),
        )
        for contest in made.values()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=95.0, help="seconds, compiling included")
    parser.add_argument("--only", default="", help="comma-separated ways")
    parser.add_argument("--build", action="store_true", help="compile for sm_90a, and no more")
    options = placed(parser, argv)
    if options.build:
        built = []
        for way in WAYS:
            with kernels_of(way):
                built += wl.build_kernels(declarations(way), archs=[ARCH.name]).kernels
        print(f"{len(built)} kernels, {sum(one.bytes for one in built) / 1e6:.1f} MB")
        return
    device: torch.device = options.device
    report = Report(NAME, device, options.out)
    for ceiling in ("matmul", "copy", "read") if device.type == "cuda" else ():
        report.add(replace(CEILINGS[ceiling](NAME, device, EFFORT), benchmark=NAME))
    torch.cuda.empty_cache()
    for contest in contests(device.type == "cuda"):
        if time.monotonic() > begin + options.limit:
            print(f"the limit of {options.limit:.0f} s ended the run")
            break
        measure(contest, options.only, report, device, begin + options.limit)
    print(f"rows: {report.path}")


if __name__ == "__main__":
    main()
