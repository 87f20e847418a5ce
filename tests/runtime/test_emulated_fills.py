"""Rows that are filled with large numbers, in CUDA kernels run by fibers."""

from __future__ import annotations

import pytest
import torch
from support.filled_rows import FILLS, check_filled_rows, filled_variants

from warploom.codegen.source import TileConfig

TILES = [TileConfig(64, 64, 4, 2, "hopper", 2), TileConfig(16, 64, 4, 2)]


@pytest.mark.some(4)
@pytest.mark.parametrize("name", filled_variants(0.0))
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("tile", TILES, ids=["hopper", "portable"])
@pytest.mark.usefixtures("emulator")
def test_filled_rows_are_the_mean_of_their_values(tile: TileConfig, fill: float, name: str) -> None:
    check_filled_rows(filled_variants(fill)[name], torch.bfloat16, tile=tile, device="cpu")
