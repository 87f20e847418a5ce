"""Boxes of tensor copies: which part of keys one copy brings, for pages of any size."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat, Rolling
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace

SM90 = arch_named("sm_90a")
TILE = TileConfig(128, 128, 8, 2, "hopper", 2)


def spec(kv_format: KVFormat, lanes: int = 128) -> AttentionSpec:
    return AttentionSpec(trace(wl.Causal()), lanes, lanes, dtype("bfloat16"), kv_format)


@pytest.mark.parametrize("page", [*range(8, 208, 8), 272, 528, 784, 1072])
def test_boxes_lie_in_a_block_and_fill_a_tile(page: int) -> None:
    """Also pages of models that mix attention and other layers, of any multiple of 16 tokens."""
    box = HOPPER.box(wl.Paged(page), TILE, (128, 128))
    assert box is not None and box.tokens % 8 == 0
    assert page % box.tokens == 0 and TILE.keys % box.tokens == 0
    larger = range(box.tokens + 1, TILE.keys + 1)
    assert not any(page % tokens == 0 and TILE.keys % tokens == 0 for tokens in larger)


@pytest.mark.parametrize("lanes", [64, 128, 256])
@pytest.mark.parametrize("page", [1, 3, 8, 16, 20, 40, 48, 80, 96, 112, 128, 144, 528, 784])
def test_prefills_over_pages_of_any_size_have_tiles_of_hopper(page: int, lanes: int) -> None:
    of = spec(wl.Paged(page), lanes)
    assert choose_tile(of, SM90, 4096.0, 100.0, 8192.0).tile.template == "hopper"
    if lanes <= 128:
        assert role_choices(of, SM90, 4)


def test_tiles_have_whole_blocks_where_they_can() -> None:
    """Of 96 keys for pages of 48, so that a box brings a page."""
    for page, keys in ((16, 128), (48, 96), (80, 128), (96, 96), (192, 96), (256, 128)):
        found = choose_tile(spec(wl.Paged(page)), SM90, 4096.0, 100.0, 8192.0).tile
        assert found.keys == keys


def test_small_blocks_are_gathered() -> None:
    for kv_format in (wl.Paged(1), wl.Paged(20), Rolling(600, 4)):
        assert HOPPER.box(kv_format, TILE, (128, 128)) is None
    whole = HOPPER.box(wl.Ragged(), TILE, (128, 128))
    assert whole is not None and whole.tokens == TILE.keys
