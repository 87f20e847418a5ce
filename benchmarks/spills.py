"""Registers and spills of every tile that prefill on Hopper can be given.

    python benchmarks/spills.py [--variants NAMES] [--dims DIMS] [--out FOLDER]

Needs no GPU: kernels are compiled, and their cubins read, 621 of them in about eight minutes on two
cores. Prints those that keep anything in local memory; writes one JSON line for each kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness import RESULTS
from rich.console import Console
from rich.progress import track
from rich.table import Table

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.dsl.types.dtypes import float16
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

LONG = 1000  # fused query rows of a request


class NormedValues(wl.Variant):
    weight = wl.Tensor("float32", ("lane",))

    def value_transform(self, v: Any, at: wl.Position) -> Any:
        return v * wl.rsqrt(wl.sum(v * v) + 1e-6) * self.weight[at.lane]


class LayerNorm(wl.Variant):
    gain = wl.Tensor("float32", ("lane",))

    def key_transform(self, k: Any, at: wl.Position) -> Any:
        centred = k - wl.mean(k)
        return centred * wl.rsqrt(wl.mean(centred * centred) + 1e-5) * self.gain[at.lane]


class Bias(wl.Variant):
    added = wl.Tensor("float32", ("q_head", "kv_pos"))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + self.added[at.q_head, at.kv_pos]


class Mask(wl.Variant):
    seen = wl.Tensor("bool", ("q_head", "kv_pos"))

    def logits_mask(self, at: wl.Position) -> Any:
        return self.seen[at.q_head, at.kv_pos]


def near() -> wl.Variant:
    return wl.Causal() & wl.SlidingWindow(100)


VARIANTS: dict[str, Callable[[], wl.Variant]] = {
    "none": wl.Variant,
    "causal": wl.Causal,
    "prefix": wl.PrefixLM,
    "documents": wl.DocumentMask,
    "sigmoid": lambda: wl.FlashSigmoid(bias=-2.0),
    "alibi": lambda: wl.Causal() & wl.Alibi(),
    "sink": lambda: wl.Causal() & wl.AttentionSink(),
    "window": near,
    "cap": lambda: wl.Causal() & wl.SoftCap(30.0),
    "window, cap": lambda: near() & wl.SoftCap(30.0),
    "rope": lambda: wl.Causal() & wl.Rope(),
    "rope in pairs": lambda: wl.Causal() & wl.Rope(interleaved=True),
    "rope, window, cap": lambda: near() & wl.SoftCap(30.0) & wl.Rope(),
    "norms": lambda: wl.Causal() & wl.QKNorm(),
    "norms, rope": lambda: wl.Causal() & wl.QKNorm() & wl.Rope(),
    "norms, rope, bias": lambda: wl.Causal() & wl.QKNorm() & wl.Rope() & Bias(),
    "layer norm": lambda: wl.Causal() & LayerNorm(),
    "values' norms": lambda: wl.Causal() & NormedValues(),
    "all norms": lambda: wl.Causal() & NormedValues() & wl.QKNorm(),
    "bias": Bias,
    "causal bias": lambda: wl.Causal() & Bias(),
    "mask": Mask,
    "causal mask": lambda: wl.Causal() & Mask(),
}
DIMS = (
    (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192),
    (256, 256),
)  # fmt: skip
FORMATS: dict[str, KVFormat] = {
    "ragged": wl.Ragged(),
    "pages of 16": wl.Paged(16),
    "pages of 1": wl.Paged(1),
}
Job = tuple[str, tuple[int, int], str]  # names of a variant and of a format


@dataclass(frozen=True)
class Used:
    """What a kernel uses.

    Attributes:
        registers: of a thread at launch; groups exchange them later.
        local_bytes: of a thread's own memory, 0 if nothing is spilled.
    """

    variant: str
    head_dim: int
    head_dim_v: int
    kv_format: str
    tile: str
    registers: int
    local_bytes: int


def used(job: Job) -> Used:
    """Compile the kernel of the tile that is chosen."""
    variant, dims, kv_format = job
    spec = AttentionSpec(trace(VARIANTS[variant]()), *dims, float16, FORMATS[kv_format])
    arch = ARCHS["sm_90a"]
    tile = choose_tile(spec, arch, LONG).tile
    source = render_cuda(spec, tile, c_structs())
    found = read_resources(run_nvrtc(source.text, arch, source.name).cubin)
    return Used(variant, *dims, kv_format, tile.label, found.registers, found.local_bytes)


def compiled(jobs: list[Job], console: Console) -> Iterator[Used]:
    with ProcessPoolExecutor() as pool:
        found = pool.map(used, jobs)
        yield from track(found, "compiling", total=len(jobs), console=console)


def table(kernels: list[Used]) -> Table:
    made = Table(title=f"{len(kernels)} kernels with local memory")
    for name in ("variant", "head_dim", "format", "tile", "bytes"):
        made.add_column(name)
    for x in kernels:
        dims = f"{x.head_dim}/{x.head_dim_v}"
        made.add_row(x.variant, dims, x.kv_format, x.tile, str(x.local_bytes))
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default="", help="names, by semicolons; all by default")
    parser.add_argument("--dims", default="", help="such as 128/128,192/128; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.variants.split(";") if name.strip()]
    pairs = (x.split("/") for x in options.dims.split(",") if x)
    asked = [(int(dim_qk), int(dim_v)) for dim_qk, dim_v in pairs]
    jobs = list(product(names or VARIANTS, asked or DIMS, FORMATS))
    console = Console()
    kernels = list(compiled(jobs, console))
    options.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(x)) + "\n" for x in kernels)
    (options.out / "spills.jsonl").write_text(lines)
    spilling = [x for x in kernels if x.local_bytes]
    console.print(table(spilling) if spilling else f"{len(kernels)} kernels, none spills")


if __name__ == "__main__":
    main()
