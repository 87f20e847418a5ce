"""Rows that one key decides: its weight is exact in portable tiles, however keys come."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("tile", [TileConfig(64, 32, 2, 2), TileConfig(16, 64, 2, 2)], ids=str)
def test_the_largest_weight_is_one_whichever_tile_it_is_in(tile: TileConfig) -> None:
    setup = Setup(wl.Ragged(), "bfloat16", 128, 128, tile=tile)
    # Of 55 keys that a row sees, one of the second tile has a weight of 0.85.
    case = Case(setup, (16, 35, 5, 1), (129, 40, 59, 0), scale=4.0, seed=446)
    assert mismatch(wl.Causal(), case) is None
