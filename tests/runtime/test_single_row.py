"""The kernel for tiles of one row, its text run by fibers on the host, agrees with the oracle."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warploom as wl
import warploom.templates
from warploom.codegen.hostcc import host_target
from warploom.codegen.render import render_cuda
from warploom.codegen.source import TileConfig
from warploom.dsl.position import Position
from warploom.dsl.symbols import Value
from warploom.runtime.kernels import Kernel, Kernels
from warploom.runtime.trials import Case, Setup, mismatch
from warploom.scheduler.layout import c_structs

TESTS = Path(__file__).resolve().parents[1]
TEMPLATES = Path(warploom.templates.__file__).parent
CTAS = 5

_HARNESS = """
namespace warploom { char shared_memory[1 << 16]; }
extern "C" __attribute__((visibility("default"))) void emulate(
    const warploom::Params* p, unsigned blocks, unsigned threads, int descending) {
  fibers::run(blocks, threads, descending != 0, [p] { warploom_kernel(*p); });
}
"""


class Emulator:
    """Builds the CUDA text of kernels for the host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Any] = {}
        self.descending = 0

    def get(self, kernels: Any, tile: TileConfig) -> Kernel:
        """Stands in for `Kernels.get`."""
        source = render_cuda(kernels._spec, tile, c_structs())
        run = self._built.get(source.text) or self._build(source.text)
        self._built[source.text] = run
        threads = 32 * tile.warps
        return Kernel(
            tile, source, None, CTAS,  # type: ignore[arg-type]
            lambda params: lambda _: run(params.address, CTAS, threads, self.descending),
        )  # fmt: skip

    def _build(self, text: str) -> Any:
        number = len(self._built)
        source, library = (self._folder / f"kernel{number}.{kind}" for kind in ("cpp", "so"))
        source.write_text('#include "cuda_intrinsics.hpp"\n' + text + _HARNESS)
        folders = [TESTS / "emulation", *(TEMPLATES / x for x in ("include", "cpu", "common"))]
        command = [*host_target().command, "-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
        command += [f"-I{folder}" for folder in folders]
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        run = ctypes.CDLL(str(library))["emulate"]
        run.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int)
        return run


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulator = Emulator(tmp_path)
    monkeypatch.setattr(Kernels, "get", lambda kernels, tile: emulator.get(kernels, tile))
    return emulator


class Seats(wl.Variant):
    """Seats that read all of a row, and one that scales values."""

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * wl.rsqrt(wl.sum(q * q) / at.head_dim + 1e-6) * (1.0 + 0.01 * at.lane)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * (1.0 + 0.01 * at.kv_pos)

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o) / at.head_dim + 1e-6) + 0.1 * at.lse


EIGHT, SIXTEEN = TileConfig(1, 64, 2, 1), TileConfig(1, 32, 2, 1)  # 32 and 16 keys of a warp
CASES = {
    "paged": (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 128, 128, tile=SIXTEEN)),
    "page of 1": (wl.Causal() & wl.SoftCap(3.0), Setup(wl.Paged(1), "float16", tile=EIGHT)),
    "HND": (Seats(), Setup(wl.Paged(5, layout="HND"), "bfloat16", 128, 64, tile=SIXTEEN)),
    "window": (wl.SlidingWindow(40), Setup(wl.Ragged(), "float16", 40, 72, tile=SIXTEEN)),
    "sink": (wl.Causal() & wl.AttentionSink(), Setup(wl.Ragged(), "bfloat16", 8, 8, tile=EIGHT)),
    "wide": (wl.Alibi(), Setup(wl.Paged(3), "bfloat16", 256, 192, tile=SIXTEEN)),
    "blocks": (wl.Causal(), Setup(wl.BlockSparse(block=(1, 5)), "float16", 32, 48, tile=EIGHT)),
    "sigmoid": (wl.FlashSigmoid(bias=-2.0), Setup(wl.Paged(16), "float16", tile=EIGHT)),
    "documents": (wl.DocumentMask(), Setup(wl.Ragged(), "bfloat16", tile=EIGHT)),
    "narrow": (
        wl.Causal() & wl.TokenKVScale(),
        Setup(wl.Paged(16), "bfloat16", 128, 128, tile=EIGHT, kv_dtype="float8_e4m3fn"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_row_agrees_with_the_oracle(emulator: Emulator, name: str) -> None:
    variant, setup = CASES[name]
    for emulator.descending, q_lens, kv_lens, heads in (
        (0, (1, 1, 1, 1), (130, 1, 257, 0), (2, 1)),  # decoding
        (1, (1,), (700,), (1, 1)),  # all CTAs share one row, whose parts are merged
        (0, (3, 0, 2), (40, 5, 33), (2, 2)),  # more rows than the tile was chosen for
    ):
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"
