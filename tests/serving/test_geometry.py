"""Where numbers lie: every token of every request has memory, its own, at one place for all."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.codegen.choice.tile_choice import every_tile
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.library.causal import Causal
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat, Paged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.serving.virtual_memory.geometry import AXES, Geometry
from warploom.serving.virtual_memory.views import Views, page_tables

PAGE, SLOTS = 4096, 3
GEOMETRIES = st.builds(
    lambda layers, heads, dim, item, order, tokens, page_size: Geometry(
        {"layer": layers, "kv": 2, "head": heads}, dim, item, order, tokens, PAGE, page_size
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((8, 24, 64)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(list(permutations(AXES))),
    st.integers(1, 300),
    st.sampled_from((None, 1, 3, 16, 200)),
)


def views_of(geometry: Geometry) -> Views:
    """Over addresses that nobody has: what is asked for is where tensors lie."""
    numbers = SLOTS * geometry.slot_bytes // geometry.item_bytes
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[geometry.item_bytes]
    return Views(torch.empty(numbers, dtype=kind, device="meta"), geometry, SLOTS, "NHD")


@settings(max_examples=150)
@given(geometry=GEOMETRIES, data=st.data())
def test_page_tables_lead_to_the_tokens_of_the_request(geometry: Geometry, data: Any) -> None:
    views = views_of(geometry)
    lengths = data.draw(st.lists(st.integers(0, geometry.max_tokens), min_size=1, max_size=SLOTS))
    slots = data.draw(st.permutations(range(SLOTS)))[: len(lengths)]
    tables = page_tables(geometry, slots, lengths)
    layer = geometry.sizes["layer"] - 1
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        pages = tables["kv_indices"][slice(*tables["kv_indptr"][i : i + 2])]
        full = max(0, len(pages) - 1) * geometry.block
        assert full + (tables["last_page_len"][i] if len(pages) else 0) == length
        for cache, own in zip(views.kv(layer), views.of_slot(slot, length, layer), strict=True):
            assert len(own) == length and cache.stride()[1:] == own.stride()
            token = np.arange(length)
            page, place = pages[token // geometry.block], token % geometry.block
            listed = cache.storage_offset() + page * cache.stride(0) + place * cache.stride(1)
            assert (listed == own.storage_offset() + token * own.stride(0)).all()
            if length:
                assert pages.max() < len(cache)


@settings(max_examples=100)
@given(geometry=GEOMETRIES)
def test_no_two_numbers_share_a_place_or_cross_into_another_plane(geometry: Geometry) -> None:
    axes = geometry.sizes | {"token": min(5, geometry.capacity)}
    vector = geometry.head_dim * geometry.item_bytes
    places = [
        sum(geometry.stride(axis) * i for axis, i in zip(axes, at, strict=True))
        for at in product(*map(range, axes.values()))
    ]
    ordered = np.sort(places)
    assert (np.diff(ordered) >= vector).all()
    last = geometry.capacity * geometry.record_bytes
    assert last <= geometry.plane_bytes and geometry.plane_bytes % PAGE == 0
    assert geometry.planes * geometry.plane_bytes <= geometry.slot_bytes
    assert geometry.slot_bytes % geometry.block_bytes == 0


@settings(max_examples=150)
@given(geometry=GEOMETRIES, data=st.data())
def test_pages_are_enough_and_none_too_many(geometry: Geometry, data: Any) -> None:
    tokens = data.draw(st.integers(1, geometry.max_tokens))
    rows = geometry.rows(tokens)
    reached = min(tokens + min(geometry.block, 128) - 1, geometry.capacity)  # tiles of 128 keys
    assert (rows - 1) * PAGE < reached * geometry.record_bytes <= rows * PAGE
    assert geometry.tokens(rows) >= tokens and geometry.tokens(rows - 1) < tokens
    assert geometry.rows(0) == 0 and geometry.tokens(0) == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_request_as_one_page_loses_no_tile_and_none_reads_behind_the_margin(
    arch: str, dim: int
) -> None:
    geometry = Geometry({"layer": 1, "kv": 2, "head": 1}, dim, 2, AXES, 32_768, PAGE, None)

    def tiles(kv_format: KVFormat) -> list[TileConfig]:
        spec = AttentionSpec(trace(Causal()), dim, dim, dtype("bfloat16"), kv_format)
        return every_tile(spec, arch_named(arch))

    found = tiles(Paged(geometry.block))
    assert {tile.keys for tile in found} == {tile.keys for tile in tiles(Paged(16))}
    assert max(tile.keys for tile in found) - 1 <= geometry.margin
