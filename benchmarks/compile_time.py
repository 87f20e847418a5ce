"""Seconds until a kernel is ready: compiled cold, with precompiled headers, and loaded from disk.

    python benchmarks/compile_time.py [--quick] [--out FOLDER]

Needs no GPU. Each figure is a median over fresh compiler processes; "load" is the first build() of
a fresh Python process, from its call to the artifact, so it includes finding and hashing headers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import RESULTS, Report, Row

import warploom as wl
from warploom.codegen.attention.templates import render_cpu, render_cuda
from warploom.codegen.build import build
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.hostcc import HostTarget, compile_cpp, host_target
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.formats import Paged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import NoCudaCompiler, NoHostCompiler
from warploom.scheduler.model.layout import c_structs

CUDA_TILES = (
    TileConfig(128, 64, warps=8),
    TileConfig(64, 64),
    TileConfig(16, 64),
    TileConfig(128, 128, warps=8, template="hopper", query_stages=2),
)
CPU_TILE = TileConfig(32, 64, warps=1)
LOAD = """
import sys, time
from pathlib import Path
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import KernelSource
name, target, language, entry = sys.argv[1:5]
source = KernelSource(name, Path(sys.argv[5]).read_text(), language, entry)
begin = time.perf_counter()
artifact = build(source, host_target() if target == "cpu" else ARCHS[target])
seconds = time.perf_counter() - begin
assert not artifact.compiled
print(seconds)
"""


def gemma_like() -> AttentionSpec:
    """Causal with a soft-cap over a paged bf16 cache, head_dim 128."""
    variant = wl.Causal() & wl.SoftCap(50.0)
    return AttentionSpec(trace(variant), 128, 128, bfloat16, Paged(16))


@contextmanager
def empty_cache() -> Iterator[Path]:
    """A cache folder of its own for this process and those it starts."""
    before = os.environ.get("WARPLOOM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="warploom-bench-") as folder:
        os.environ["WARPLOOM_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("WARPLOOM_CACHE_DIR")
            if before is not None:
                os.environ["WARPLOOM_CACHE_DIR"] = before


def median_row(case: str, impl: str, seconds: list[float]) -> Row:
    times = sorted(1e3 * value for value in seconds)
    median = round(statistics.median(times), 2)
    return Row(
        "compile_time", case, impl, median, "ms", median, round(times[0], 2), round(times[-1], 2),
        samples=len(times),
    )  # fmt: skip


def timed(samples: int, run: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(samples):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds


def load_seconds(source: KernelSource, target: str, samples: int) -> list[float]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write(source.text)
        text.flush()
        arguments = [source.name, target, source.language, source.entry, text.name]
        command = [sys.executable, "-c", LOAD, *arguments]
        # cwd: `-c` looks there first, and in a checkout's root finds a warploom without subpackages
        runs = (
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd="/")
            for _ in range(samples)
        )
        return [float(run.stdout) for run in runs]


def cuda_rows(report: Report, arch: Arch, tile: TileConfig, samples: int) -> None:
    source = render_cuda(gemma_like(), tile, c_structs())
    case = f"{arch.name}, {tile.template}, tile {tile.rows}x{tile.keys}"

    def compile_it(use_pch: bool) -> str:
        return run_nvrtc(source.text, arch, source.name, use_pch=use_pch).pch

    cold = timed(samples, lambda: compile_it(False))
    report.add(median_row(case, "cold", cold))
    with empty_cache():
        first = timed(1, lambda: compile_it(True))
        report.add(median_row(case, "cold, makes headers", first))
        warm = timed(samples, lambda: compile_it(True))
        if compile_it(True) == "used":
            report.add(median_row(case, "warm headers", warm))
        build(source, arch)
        report.add(median_row(case, "load", load_seconds(source, arch.name, 2 * samples)))


def host_rows(report: Report, host: HostTarget, samples: int) -> None:
    source = render_cpu(gemma_like(), CPU_TILE, c_structs())
    cold = timed(samples, lambda: compile_cpp(source, host))
    report.add(median_row("host C++", "cold", cold))
    with empty_cache():
        build(source, host)
        report.add(median_row("host C++", "load", load_seconds(source, "cpu", 2 * samples)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one sample, one tile")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(argv)
    samples = 1 if options.quick else 5
    report = Report("compile_time", torch.device("cpu"), options.out)
    try:
        for tile in CUDA_TILES[:1] if options.quick else CUDA_TILES:
            cuda_rows(report, ARCHS["sm_90a"], tile, samples)
    except NoCudaCompiler as error:
        report.console.print(f"no CUDA figures: {error}")
    try:
        host_rows(report, host_target(), samples)
    except NoHostCompiler as error:
        report.console.print(f"no host figures: {error}")
    report.finish()


if __name__ == "__main__":
    main()
