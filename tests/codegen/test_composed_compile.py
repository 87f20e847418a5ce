"""Composed kernels compile for every architecture and template, and fit what was computed."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.compilers.arch import ARCHS, arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import Compiled, run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("toolchain")]

EVERYTHING = wl.Causal() & wl.Alibi() & wl.SoftCap(30.0) & wl.Rope()


class NormOfRequest(wl.Variant):
    """The output transform reduces over lanes what it loads for the row's request."""

    weight = wl.Tensor("float32", ("batch",))

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o * self.weight[at.batch]) + 1.0)


def compiled(variant: wl.Variant, tile: TileConfig, arch: str, page: int, dim: int) -> Compiled:
    spec = AttentionSpec(trace(variant), dim, dim, dtype("bfloat16"), wl.Composed(page))
    source = render_cuda(spec, tile, c_structs(composed=True))
    return run_nvrtc(source.text, arch_named(arch), source.name)


@pytest.mark.some(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "tile",
    [TileConfig(16, 64, 2, 2), TileConfig(64, 32, 2, 2)],
    ids=lambda tile: f"{tile.rows} rows",
)
def test_every_architecture(arch: str, tile: TileConfig) -> None:
    kernel = compiled(wl.Causal(), tile, arch, 16, 128)
    assert kernel.spill_bytes == 0


def test_masks_that_read_a_lot_are_not_squeezed_for_a_second_cta() -> None:
    kernel = compiled(wl.TreeMask(), TileConfig(128, 32, 8, 2), "sm_86", 16, 128)
    assert kernel.spill_bytes == 0


TILES = {
    "four threads a row": (wl.Causal(), TileConfig(64, 32, 2, 2), 16, 96),
    "streamed": (wl.Causal(), TileConfig(16, 128, 4, 2), 16, 128),
    "streamed, every hook": (EVERYTHING, TileConfig(16, 64, 2, 2), 16, 128),
    "128": (wl.Causal() & wl.SlidingWindow(100), TileConfig(128, 64, 4, 2), 16, 128),
    "every hook": (EVERYTHING, TileConfig(64, 32, 4, 2), 16, 128),
    "output": (wl.Causal() & NormOfRequest(), TileConfig(128, 64, 8, 2), 16, 128),
    "hopper, output": (NormOfRequest(), TileConfig(128, 128, 8, 2, "hopper", 1), 16, 128),
    "hopper": (wl.Variant(), TileConfig(128, 128, 8, 2, "hopper", 1), 16, 128),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", TILES)
def test_every_tile(name: str) -> None:
    variant, tile, page, dim = TILES[name]
    assert read_resources(compiled(variant, tile, "sm_90a", page, dim).cubin).local_bytes <= 64
