"""Two tiles in one launch of the Hopper template: who gets them, and that they compile."""

from __future__ import annotations

import pytest
from support.query_rope import QueryRope

import warploom as wl
from warploom.codegen.attention.hopper import Hopper
from warploom.codegen.attention.templates import HOPPER, TALL
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import read_resources
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import UnsupportedSpec
from warploom.scheduler.model.layout import c_structs

CAUSAL = wl.Causal()
SM90 = arch_named("sm_90a")
FORMATS = [
    *(wl.Paged(16), wl.Paged(1), wl.Ragged(), wl.BlockSparse((16, 8)), wl.Rolling(512, 4)),
    *(wl.Composed(16), wl.Composed(1)),
]


def spec(
    variant: Variant = CAUSAL,
    kv_format: KVFormat = FORMATS[0],
    lanes: int = 128,
    stored: str | None = None,
) -> AttentionSpec:
    found = None if stored is None else kv_dtype(stored)
    traced = trace(variant)
    return AttentionSpec(traced, lanes, lanes, dtype("bfloat16"), kv_format, found)


@pytest.mark.parametrize(
    "refused",
    [
        spec(lanes=80),
        spec(lanes=256),
        spec(lanes=64, stored="float8_e4m3fn"),
        spec(lanes=64, kv_format=wl.Composed(16)),
        spec(wl.Causal() & wl.Rope()),
        spec(wl.TokenKVScale(), stored="float8_e4m3fn"),
    ],
    ids=[
        *("80 lanes", "256 lanes", "64 lanes of 8 bits", "64 lanes, shared keys"),
        *("rope", "a scale of each token"),
    ],
)
def test_what_has_one_tile(refused: AttentionSpec) -> None:
    assert role_choices(refused, SM90, 4) == ()


@pytest.mark.parametrize("lanes", [64, 96])
def test_fewer_lanes_have_decodes_of_8_and_of_16_rows(lanes: int) -> None:
    found = role_choices(spec(lanes=lanes), SM90, 8)
    assert [one.tile.decode and one.tile.decode.rows for one in found] == [8, 16]
    (tall,) = role_choices(spec(lanes=lanes), SM90, 9)
    assert tall.tile.decode is not None and tall.tile.decode.rows == 16
    assert role_choices(spec(lanes=lanes), SM90, 17) == ()


@pytest.mark.parametrize("variant", [CAUSAL, wl.HeadKVScale()], ids=["plain", "scaled"])
def test_8_bit_caches_have_two_roles(variant: Variant) -> None:
    for stored in ("float8_e4m3fn", "float8_e5m2", "int8"):
        of = spec(variant, stored=stored)
        tile = role_choices(of, SM90, 4)[0].tile
        assert tile.decode is not None and tile.decode.rows == 8
        assert HOPPER.constants(of, tile)["transformer"] is False
        assert not HOPPER.decodes.copies_boxes(of, tile.decode)


def test_rotated_queries_change_no_tile() -> None:
    """As serving engines have them, whose keys are rotated when they are appended."""
    rotated = spec(wl.Causal() & QueryRope())
    choices = role_choices(rotated, SM90, 4)
    assert choices == role_choices(spec(), SM90, 4)
    tile = choices[0].tile
    assert HOPPER.threads(rotated, tile) == HOPPER.threads(spec(), tile)  # no group that transforms


@pytest.mark.parametrize("variant", [wl.Rope(), wl.QKNorm()], ids=["rope", "norms"])
def test_transformed_keys_have_two_roles_if_asked_for(variant: Variant) -> None:
    tile = role_choices(spec(), SM90, 4)[0].tile
    found = HOPPER.constants(spec(variant, wl.Ragged()), tile)
    assert found["transformer"] is False and found["transformer_registers"] == 0


def test_others_have_one_tile_on_other_architectures() -> None:
    assert role_choices(spec(), arch_named("sm_80"), 4) == ()
    assert role_choices(spec(), arch_named("sm_100"), 4) == ()


def test_what_leaves_decodes_too_few_registers_is_refused_by_name() -> None:
    choice = role_choices(spec(), SM90, 4)[0]
    with pytest.raises(UnsupportedSpec, match="more than 128 lanes leave"):
        HOPPER.kernel(spec(lanes=192), choice.tile)
    with pytest.raises(UnsupportedSpec, match="a group of its own leaves"):
        Hopper("group").kernel(spec(wl.Causal() & wl.Rope()), choice.tile)


@pytest.mark.parametrize("group", [1, 8, 9, 17])
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_decodes_have_as_many_warps_as_fit(kv_format: KVFormat, group: int) -> None:
    choices = role_choices(spec(kv_format=kv_format), SM90, group)
    decodes = [choice.tile.decode for choice in choices]
    heights = [rows for rows in (8, 16) if group <= rows]
    if kv_format.composed:  # tiles of 16 rows were slower there than one for all
        heights = heights[:1] if group <= 8 else []
    assert [decode and decode.rows for decode in decodes] == heights
    for choice, decode in zip(choices, decodes, strict=True):
        assert decode is not None and decode.keys == 32 * decode.warps and decode.warps >= 4
        shape = HOPPER.launch(spec(kv_format=kv_format), choice.tile, SM90)
        assert shape.shared_bytes <= SM90.shared_per_cta and shape.ctas_per_sm == 1


@pytest.mark.some(1)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(
    ("variant", "kv_format", "group", "lanes"),
    [
        (wl.Causal(), wl.Paged(16), 4, 128),
        (wl.Causal(), wl.Paged(16), 16, 128),
        (wl.Causal() & wl.SoftCap(30.0) & wl.Alibi(), wl.Ragged(), 4, 128),
        (wl.FlashSigmoid(bias=-2.0), wl.Paged(1), 8, 128),
        (wl.Causal() & QueryRope(), wl.Paged(16), 4, 128),
        (wl.Causal(), wl.Composed(16), 4, 128),
        (wl.Causal() & wl.SoftCap(30.0) & wl.Alibi(), wl.Composed(1), 4, 128),
        (wl.Causal(), wl.Paged(16), 8, 64),
        (wl.Causal() & wl.SlidingWindow(127) & wl.AttentionSink(), wl.Paged(16), 8, 64),
        (wl.Causal() & QueryRope(), wl.Ragged(), 4, 96),
        (wl.Causal() & wl.SlidingWindow(127) & wl.AttentionSink(), wl.Paged(16), 16, 64),
        (wl.Causal(), wl.Paged(16), 16, 96),
    ],
    ids=[
        *("causal", "causal, 16 rows", "cap and bias", "sigmoid", "rotated queries"),
        *("shared keys", "shared keys, cap and bias"),
        *("64 lanes", "64 lanes, a window and sinks", "96 lanes, rotated queries"),
        *("64 lanes, 16 rows", "96 lanes, 16 rows"),
    ],
)
def test_kernels_compile_for_what_a_cta_is_launched_with(
    variant: Variant, kv_format: KVFormat, group: int, lanes: int
) -> None:
    of = spec(variant, kv_format, lanes)
    choice = role_choices(of, SM90, group)[0]
    structs = c_structs(kv_format.composed, roles=True)
    source = HOPPER.kernel(of, choice.tile).render("cuda", structs)
    used = read_resources(run_nvrtc(source.text, SM90, source.name).cubin)
    shape = HOPPER.launch(of, choice.tile, SM90)
    assert used.registers * shape.threads <= 65_536 and used.registers == shape.registers
    assert used.local_bytes == 0 or "query_transform" not in of.variant.hooks


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        (TileConfig(16, 128, 4, 2), "128 threads, fewer than"),
        (TileConfig(16, 64, 2, 2, "hopper"), "stream through portable tiles"),
        (TileConfig(32, 64, 2, 2), "stream through portable tiles"),
    ],
)
def test_portable_roles_that_cannot_be_are_refused(decode: TileConfig, reason: str) -> None:
    with pytest.raises(UnsupportedSpec, match=reason):
        TALL.kernel(spec(), TileConfig(64, 32, 4, 2, decode=decode))
