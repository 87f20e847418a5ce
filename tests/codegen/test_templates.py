"""Every CUDA template, compiled for every architecture it serves, on machines without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.disassembly import disassembled

import warploom as wl
from warploom.codegen.attention.templates import render_cuda, template_of
from warploom.codegen.build import build
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.headers import CudaToolchain
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16, float16
from warploom.dsl.types.formats import BlockSparse, Dense, KVFormat, Paged, Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import CompileError, UnsupportedSpec
from warploom.scheduler.model.layout import c_structs

pytestmark = pytest.mark.nvrtc


class ShiftedValues(wl.Variant):
    def value_transform(self, v: Value, at: Position) -> Value:
        return v * 2.0 + 1.0


class NormedValues(wl.Variant):
    def value_transform(self, v: Value, at: Position) -> Value:
        return v * wl.rsqrt(wl.sum(v * v))


class BiasOfElements(wl.Variant):
    bias = wl.Tensor("float32", ("q_head", "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.bias[at.q_head, at.kv_pos]


class KeptKeys(wl.Variant):
    kept = wl.Tensor("bool", ("kv_pos",))

    def logits_mask(self, at: Position) -> Value:
        return self.kept[at.kv_pos]


@dataclass(frozen=True)
class Example:
    """A spec and the mean number of fused rows that its tile is chosen for."""

    variant: Variant
    head_dim: int
    head_dim_v: int
    kv_format: KVFormat
    rows: int

    @property
    def spec(self) -> AttentionSpec:
        dtype = bfloat16 if self.rows % 2 else float16
        return AttentionSpec(
            trace(self.variant), self.head_dim, self.head_dim_v, dtype, self.kv_format
        )


# Every row tile, format and hook at least once; head dimensions that are padded, too.
EXAMPLES = {
    "decode one row": Example(wl.Causal(), 128, 128, Paged(16), 1),
    "decode paged 1": Example(wl.Causal(), 128, 128, Paged(1), 7),
    "decode wide block-sparse": Example(wl.SoftCap(30.0), 256, 256, BlockSparse(block=(16, 16)), 7),
    "chunk ragged": Example(wl.Rope() & wl.Causal(), 128, 128, Ragged(), 50),
    "chunk wide paged": Example(wl.Causal(), 256, 256, Paged(16), 50),
    "prefill dense padded": Example(wl.QKNorm() & wl.Alibi(), 72, 40, Dense(), 1000),
    "prefill ragged": Example(wl.Causal() & wl.SoftCap(50.0), 128, 128, Ragged(), 1001),
    "prefill rope": Example(wl.Rope(), 128, 128, Ragged(), 500),
    "prefill documents": Example(wl.DocumentMask(), 128, 128, Ragged(), 501),
    "prefill paged 3 sink": Example(wl.AttentionSink() & wl.Causal(), 64, 64, Paged(3), 500),
    "prefill narrow": Example(wl.Causal(), 64, 64, Ragged(), 500),
    "prefill paged 16 latent": Example(wl.Causal(), 192, 128, Paged(16), 501),
    "prefill rope over pages": Example(wl.Rope() & wl.Causal(), 128, 128, Paged(16), 501),
    "prefill norm": Example(wl.QKNorm() & wl.Causal(), 128, 128, Ragged(), 501),
    "prefill narrow norm and rope": Example(wl.QKNorm() & wl.Rope(), 64, 64, Ragged(), 501),
    "prefill norm and rope": Example(
        wl.QKNorm() & wl.Rope() & wl.Causal(), 128, 128, Paged(16), 501
    ),
    "prefill latent rope": Example(wl.Rope() & wl.Causal(), 192, 128, Paged(16), 501),
    "prefill listed values": Example(ShiftedValues(), 128, 128, BlockSparse(block=(1, 8)), 501),
    "prefill block-sparse sigmoid": Example(
        wl.FlashSigmoid() & wl.Causal(), 128, 128, BlockSparse(block=(64, 64)), 500
    ),
}


@pytest.fixture(autouse=True)
def _compiler(toolchain: CudaToolchain) -> None:
    """Without CUDA's compiler these tests are skipped."""


def compiled(example: Example, arch: Arch, tile: TileConfig) -> Path:
    spec = example.spec
    source = render_cuda(spec, tile, c_structs())
    artifact = build(source, arch)
    assert artifact.resources is not None
    assert artifact.resources.spill_bytes in (0, None), source.name
    if max(spec.head_dim_qk, spec.head_dim_v) <= 128:
        assert artifact.resources.local_bytes == 0, source.name
    return artifact.path


@pytest.mark.some(7)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize(
    "name", ["decode one row", "decode paged 1", "chunk ragged", "prefill ragged"]
)
def test_every_architecture_compiles_without_spills(name: str, arch: Arch) -> None:
    example = EXAMPLES[name]
    compiled(example, arch, choose_tile(example.spec, arch, example.rows).tile)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_hook_and_format_compiles_for_hopper(name: str) -> None:
    arch, example = ARCHS["sm_90a"], EXAMPLES[name]
    tile = choose_tile(example.spec, arch, example.rows).tile
    assert tile.template == ("hopper" if example.rows > 64 else "portable")
    compiled(example, arch, tile)


@pytest.mark.parametrize("name", ["chunk wide paged", "decode wide block-sparse"])
def test_wide_heads_fit_small_shared_memory(name: str) -> None:
    example = EXAMPLES[name]
    compiled(example, ARCHS["sm_89"], choose_tile(example.spec, ARCHS["sm_89"], example.rows).tile)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("prefill ragged", TileConfig(64, 128, 4, 2, "hopper", 2)),
        ("prefill narrow", TileConfig(192, 96, 12, 3, "hopper", 2)),
    ],
)
def test_one_and_three_groups_compute_on_hopper(name: str, tile: TileConfig) -> None:
    compiled(EXAMPLES[name], ARCHS["sm_90a"], tile)


# Where registers are scarce: hooks that keep numbers of lanes or load them for each element.
TIGHT = {
    "window over wide heads": Example(wl.SlidingWindow(1023), 256, 256, Ragged(), 500),
    "keys kept, wide heads": Example(wl.Causal() & KeptKeys(), 256, 256, Ragged(), 500),
    "rope, wide heads": Example(wl.Rope() & wl.Causal(), 256, 256, Paged(1), 500),
    "rope, 192": Example(wl.Rope() & wl.Causal(), 192, 192, Ragged(), 500),
    "rope, 72": Example(wl.Rope() & wl.Causal(), 72, 72, Ragged(), 500),
    "norms, wide heads": Example(wl.QKNorm() & wl.Causal(), 256, 256, Paged(1), 500),
    "norms and rope, wide heads": Example(
        wl.QKNorm() & wl.Rope() & wl.Causal(), 256, 256, Ragged(), 500
    ),
    "norms and rope, 192": Example(wl.QKNorm() & wl.Rope() & wl.Causal(), 192, 192, Paged(1), 500),
    "norms and rope, 96": Example(wl.QKNorm() & wl.Rope() & wl.Causal(), 96, 96, Paged(1), 500),
    "norms of keys and of values": Example(wl.QKNorm() & NormedValues(), 128, 128, Ragged(), 500),
    "bias of each element": Example(wl.Causal() & BiasOfElements(), 128, 128, Ragged(), 500),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", TIGHT)
def test_tight_registers_hold_everything_on_hopper(name: str) -> None:
    spec, arch = TIGHT[name].spec, ARCHS["sm_90a"]
    tile = choose_tile(spec, arch, 500).tile
    assert tile.template == "hopper"
    used = build(render_cuda(spec, tile, c_structs()), arch).resources
    assert used is not None and used.local_bytes == 0


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("decode one row", TileConfig(1, 64, 4, 1)),
        ("decode paged 1", TileConfig(16, 64, 2, 2)),
        ("prefill ragged", TileConfig(128, 64, 8, 2, "hopper", 1)),
    ],
)
def test_headers_refuse_a_table_of_shared_memory_with_another_size(
    name: str, tile: TileConfig
) -> None:
    source = render_cuda(EXAMPLES[name].spec, tile, c_structs())
    text = re.sub(r"(kItemsBytes = \d+)", r"\1 + 16", source.text)
    with pytest.raises(CompileError, match="static assertion failed"):
        run_nvrtc(text, ARCHS["sm_90a"], source.name)


def test_hopper_uses_its_own_instructions() -> None:
    arch, example = ARCHS["sm_90a"], EXAMPLES["prefill ragged"]
    cubin = compiled(example, arch, choose_tile(example.spec, arch, example.rows).tile)
    sass = disassembled(cubin)
    for instruction in ("HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"):
        assert instruction in sass
    assert "HMMA.16816" not in sass


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (TileConfig(48, 64, 4), "16 or 32 rows, and 4 are to share 48"),
        (TileConfig(128, 64, 2), "16 or 32 rows, and 2 are to share 128"),
        (TileConfig(64, 72, 4), "keys are a multiple of 16"),
        (TileConfig(64, 128, 2), "at most one for each of 64 threads"),
        (TileConfig(64, 64, 4, 1), "one stage"),
        (TileConfig(16, 100, 4), "16 or 32 keys, and 4 are to share 100"),
        (TileConfig(16, 64, 2, 1), "one stage"),
        (TileConfig(96, 128, 6, 2, "hopper"), "64 rows each, and it has 96"),
        (TileConfig(256, 64, 16, 2, "hopper"), "64 rows each, and it has 256"),
        (TileConfig(128, 64, 4, 2, "hopper"), "of 8 warps in all, and it has 4"),
        (TileConfig(128, 80, 8, 2, "hopper"), "a multiple of 32, and it has 80"),
        (TileConfig(128, 64, 8, 1, "hopper"), "one stage"),
        (TileConfig(128, 64, 4, decode=TileConfig(16, 64, 3)), "16 or 32 keys"),
        (TileConfig(128, 64, 8, 2, "hopper", decode=TileConfig(16, 64, 2, 1)), "one stage"),
    ],
    ids=lambda value: value.label if isinstance(value, TileConfig) else "",
)
def test_tiles_that_no_kernel_can_have_are_refused_by_name(tile: TileConfig, reason: str) -> None:
    spec = AttentionSpec(trace(wl.Causal()), 64, 64, float16, wl.Ragged())
    with pytest.raises(UnsupportedSpec, match=reason) as found:
        template_of(tile).render(spec, tile, c_structs(roles=tile.decode is not None))
    of_decode = tile.decode is not None
    assert ("another `decode`" in str(found.value)) == of_decode
