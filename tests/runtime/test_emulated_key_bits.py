"""What rows see by the bits of keys is what the oracle shows them, wherever tiles end."""

from __future__ import annotations

from typing import Any

import pytest
from support.emulator import Emulator

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

MOST = 2**31 - 1
HOPPER = TileConfig(64, 64, 4, 2, "hopper", 2)
TURNED = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(8, 96, 3, 2))
FULL = TileConfig(64, 128, 4, 2)  # 32 keys a thread, all bits of a word
TALL = TileConfig(64, 32, 2, 2)


class Ring(wl.Variant):
    """All but a gap, whose ends may be anything; rows before a position see nothing."""

    low = wl.Scalar("int32")
    high = wl.Scalar("int32")
    start = wl.Scalar("int32")

    def logits_mask(self, at: Position) -> Any:
        away = at.q_pos - at.kv_pos
        return ~((away > self.low) & (self.high > away)) & (at.q_pos >= self.start)


CASES = [
    (wl.Causal() & wl.SlidingWindow(37), HOPPER),
    (wl.Causal() & wl.SlidingWindow(MOST), FULL),
    (wl.SlidingWindow(0, 33, sinks=5), FULL),
    (wl.Causal() & wl.SlidingWindow(70, sinks=3), TURNED),
    (Ring(low=2, high=40, start=9), TALL),
    (Ring(low=-MOST - 1, high=7, start=0), TURNED),
    (Ring(low=-3, high=MOST, start=-5) & wl.SoftCap(4.0), HOPPER),
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("variant", "tile"), CASES, ids=lambda x: str(x)[:40])
def test_rows_see_what_the_mask_shows(
    emulator: Emulator, variant: wl.Variant, tile: TileConfig
) -> None:
    most = 70 if tile.rows > 16 else 16
    for seed, keys in enumerate((1, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 300)):
        rows = (1, min(keys, most)) if tile.of_roles else (min(keys, most), min(keys, 3))
        setup = Setup(wl.Paged(16), "bfloat16", 32, 32, tile=tile)
        found = mismatch(variant, Case(setup, rows, (keys, keys), 1, 2, seed=seed))
        assert found is None, f"{keys} keys: {found}"
