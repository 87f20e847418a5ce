"""What two roles cost: by FLOPs and bytes on a GPU, by rows on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import warploom as wl
from warploom.codegen.choice.role_cost import RoleCost, forecast, role_cost, role_cost_on_cpu
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
    assert found.prefill == 1_800_000 and found.saturating == 98
    assert found.decode == -(-64 * 256 * 2 * 1000 // 43)  # bytes at 43 GB/s
    half = role_cost(spec(128), replace(TILE, rows=64))
    assert half.prefill == 900_000 and half.decode == found.decode
    assert role_cost(spec(128), replace(TILE, template="portable")).prefill > found.prefill
    small = role_cost(spec(128, "int8"), TILE)
    # widening takes a prefill time, and a decode as many instructions for half the bytes
    assert small.prefill == 2_800_000 and small.saturating == -(-4200 // 30)
    assert small.decode == -(-64 * 256 * 1000 // 30) and small.decode_in_tall == 1_400_000
    assert found.decode_in_tall == 0  # memory is always slower


def test_the_softmax_takes_as_long_for_fewer_lanes() -> None:
    """0.45 of the price of 128 lanes; the products take the rest in proportion to lanes."""
    assert role_cost(spec(64), TILE).prefill == int(1_800_000 * (0.45 + 0.55 / 2))
    assert role_cost(spec(96), TILE).prefill == int(1_800_000 * (0.45 + 0.55 * 3 / 4))
    # Measured alone with 64 lanes: 1.273 us for 192 rows by 96 keys, where the price of 128 lanes
    # is 1.08 times what was measured alone.
    wide = replace(TILE, rows=192, keys=96)
    assert abs(role_cost(spec(64), wide).prefill / (1_273_000 * 1.08) - 1) < 0.1


def test_a_taller_decode_tile_reads_as_much_slower_as_it_has_more_instructions() -> None:
    """540 instructions for a key tile of 8 rows, and 751 for one of 16 (cubins of sm_90a)."""
    turned = role_cost(spec(128), replace(TILE, decode=TileConfig(8, 64)))
    assert abs(role_cost(spec(128), TILE).decode / turned.decode / (751 / 540) - 1) < 0.01


class Waves(wl.Variant):
    """A function of a logit times one of its key alone, and one of the distance."""

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return wl.tanh(logits) * wl.exp(-at.kv_pos) - wl.log(1 + abs(at.q_pos - at.kv_pos))


def chain(length: int, remainder: bool = False) -> wl.Variant:
    """So many steps, of a product with a sum or of a remainder."""

    class Chain(wl.Variant):
        def logits_transform(self, logits: Any, at: Any) -> Any:
            for i in range(length):
                step = (at.kv_pos * (i + 3) + at.q_pos) % 7
                logits = logits + step if remainder else logits * (0.9 + 0.01 * i) + 0.1 * (i + 1)
            return logits

    return Chain()


def prefill(variant: wl.Variant, lanes: int = 128, stored: str | None = None) -> int:
    return role_cost(replace(spec(lanes, stored), variant=trace(variant)), TILE).prefill


def test_instructions_of_an_element_make_prefills_longer() -> None:
    """But for one. What a row or a key has once, and what the softmax takes over, has none."""
    capped = wl.Causal() & wl.SoftCap(5.0)
    assert prefill(capped) == 1_800_000 + 3 * 100_000  # tanh, and the scale, which hides
    assert prefill(capped, stored="int8") == 2_800_000 + 3 * 100_000
    assert prefill(capped, lanes=64) == prefill(wl.Causal(), lanes=64) + 3 * 100_000  # as many
    assert prefill(wl.Causal() & wl.Alibi()) == 1_800_000
    assert prefill(wl.Causal() & wl.DocumentMask()) == 1_800_000 + 3 * 100_000  # in every tile
    # a scale, two functions, the difference of a product, and 1 + the distance, whole numbers that
    # take twice as long, as a float
    assert prefill(Waves()) == 1_800_000 + (1 + 3 + 3 + 1 + (2 + 2 + 4) - 1) * 100_000
    # a sigmoid is an exponential, which a softmax has, too, and a reciprocal
    assert prefill(wl.FlashSigmoid()) == 1_800_000 + 3 * 100_000


@pytest.mark.parametrize(
    ("length", "remainder", "times"),
    [(4, False, 1.21), (16, False, 2.0), (32, False, 3.11), (1, True, 2.32), (4, True, 5.62)],
)
def test_prices_of_chains_are_as_measured(length: int, remainder: bool, times: float) -> None:
    """Of 1,024 rows over 8,192 keys alone on an H200, over the time without one, 1.67 us a tile."""
    made = chain(length, remainder)
    found = role_cost(replace(spec(128), variant=trace(made)), TILE)
    assert abs(found.prefill / 1_670_000 / times - 1) < 0.1
    assert found.decode_in_tall == found.prefill // 2  # a tile of 64 keys in one of 128


def test_two_roles_pay_where_overlapping_saves_more_than_it_takes() -> None:
    """Numbers of key tiles are CTAs x microseconds here; half of the CTAs saturate memory."""
    cost = RoleCost(prefill=1_000_000, decode=1_000_000, saturating=50)

    def does(prefill: int, decode: int, ctas: int = 100) -> bool:
        return forecast(cost, 100 * prefill, 50 * decode, ctas).pays

    assert does(100, 100)  # 150 us instead of 212
    assert not does(0, 0) and not does(100, 0)  # a twenty-fifth must be saved, and more than 0
    assert not does(100, 6) and does(100, 7)
    assert not does(10_000, 100) and does(10_000, 1000)
    assert not forecast(cost, 0, 0, 100).pays
    assert not does(100, 100, ctas=50)  # so few read no faster together than one by one
    told = forecast(replace(cost, decode_in_tall=4_000_000), 100 * 100, 50 * 100, 100)
    assert told.in_turn == 300 * 10**6 and told.at_once == 150 * 10**6  # what is not read in time


def test_a_key_costs_a_tile_of_a_cpu_its_rows_and_some_more() -> None:
    found = role_cost_on_cpu(TILE)
    assert (found.prefill, found.decode) == (128 * (128 + 16), 64 * (16 + 16))
