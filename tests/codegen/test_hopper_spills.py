"""The Hopper kernels that need the most registers keep nothing in local memory.

`benchmarks/spills.py` compiles 621 kernels; these are the ones that spilled once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hopper_jobs import Biased

import warploom as wl
from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_structs

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TIGHT = [
    ("norms, rope", 160, "ragged"),
    ("norms, rope", 160, "pages of 1"),
    ("norms, rope", 192, "pages of 1"),
    ("norms, rope", 256, "ragged"),
    ("norms, rope, bias", 128, "pages of 1"),
    ("rope, window, cap", 72, "ragged"),
    ("rope, window, cap", 80, "ragged"),
    ("rope", 192, "pages of 16"),
    ("rope", 256, "pages of 1"),
    ("norms", 256, "ragged"),
    ("layer norm", 256, "pages of 16"),
    ("all norms", 128, "ragged"),
    ("all norms", 192, "pages of 1"),
    ("values' norms", 128, "ragged"),
    ("values' norms", 256, "ragged"),
    ("causal bias", 128, "ragged"),
    ("mask", 128, "pages of 1"),
    ("prefix", 160, "pages of 1"),
    ("prefix", 192, "ragged"),
    ("documents", 160, "pages of 1"),
]


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(("variant", "dim", "kv_format"), TIGHT)
def test_what_needs_the_most_registers_spills_nothing(
    variant: str, dim: int, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from spills import used  # pyright: ignore[reportMissingImports]

    found = used((variant, (dim, dim), kv_format))
    assert found.tile.startswith("hopper")
    assert found.local_bytes == 0, found


# Beside 8-bit keys: with a group that widens, without one, and in tiles of fewer keys.
NARROW = [
    (wl.Causal(), wl.Paged(16), "float8_e4m3fn"),
    (wl.Causal() & wl.HeadKVScale() & wl.SoftCap(30.0), wl.Paged(1), "int8"),
    (wl.Causal() & wl.Rope(), wl.Paged(16), "float8_e4m3fn"),
    (wl.Causal() & Biased(), wl.Ragged(), "float8_e4m3fn"),
    (wl.DocumentMask(), wl.Paged(1), "float8_e5m2"),
    (wl.Alibi() & wl.FlashSigmoid(bias=-2.0), wl.Paged(16), "float8_e4m3fn"),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), wl.Paged(1), "int8"),
]


@pytest.mark.some(2)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(("variant", "kv_format", "stored"), NARROW)
def test_8_bit_keys_spill_nothing(variant: Variant, kv_format: KVFormat, stored: str) -> None:
    arch, elements = arch_named("sm_90a"), (dtype("bfloat16"), kv_format, kv_dtype(stored))
    of = AttentionSpec(trace(variant), 128, 128, *elements)
    tile = HOPPER.tiles(of, arch, Work(128))[0]
    source = HOPPER.kernel(of, tile).render("cuda", c_structs())
    found = read_resources(run_nvrtc(source.text, arch, source.name).cubin)
    assert found.local_bytes == 0, found
    assert found.registers == HOPPER.launch(of, tile, arch).registers
