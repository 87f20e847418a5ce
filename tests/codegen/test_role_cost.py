"""What two roles cost: by FLOPs and bytes on a GPU, by rows on a CPU."""

from __future__ import annotations

from dataclasses import replace

import warploom as wl
from warploom.codegen.attention.role_cost import role_cost, role_cost_on_cpu
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype, kv_dtype
from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace

TILE = TileConfig(128, 128, template="hopper", decode=TileConfig(16, 64))


def spec(lanes: int, stored: str | None = None) -> AttentionSpec:
    found = None if stored is None else kv_dtype(stored)
    return AttentionSpec(trace(wl.Causal()), lanes, lanes, dtype("float16"), Ragged(), found)


def test_prices_follow_flops_and_bytes() -> None:
    found = role_cost(spec(128), TILE)
    assert found.prefill == 1_800_000 and found.saturating == 81
    assert found.decode == -(-64 * 256 * 2 * 1000 // 52)  # bytes at 52 GB/s
    assert role_cost(spec(64), TILE).prefill == 900_000
    half = role_cost(spec(128), replace(TILE, rows=64))
    assert half.prefill == 900_000 and half.decode == found.decode
    assert role_cost(spec(128), replace(TILE, template="portable")).prefill > found.prefill
    small = role_cost(spec(128, "int8"), TILE)
    assert small.prefill == found.prefill and 0 <= 2 * small.decode - found.decode <= 2


def test_a_key_costs_a_tile_of_a_cpu_its_rows_and_some_more() -> None:
    found = role_cost_on_cpu(TILE)
    assert (found.prefill, found.decode) == (128 * (128 + 16), 64 * (16 + 16))
