"""Large logits on a GPU, in tiles of one row, of streamed rows, and of the Hopper template."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.far_logits import Doubled, errors_of_far_logits
from support.filled_rows import FILLS, check_filled_rows, filled_variants

from warploom.codegen.source import TileConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
@pytest.mark.parametrize("rows", [1, 5, 70, 300])
@pytest.mark.parametrize("variant", [None, Doubled()], ids=["plain", "transformed"])
def test_ties_and_maxima_of_far_logits(
    rows: int, heads: tuple[int, int], dtype: Any, variant: Any, cuda: Any
) -> None:
    most = {torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for keys in (1, 300, 513):
        for constant in (None, 100.0):
            found = errors_of_far_logits(rows, keys, heads, dtype, cuda, variant, constant)
            for scale, (of_out, of_lse) in found.items():
                assert of_out <= most, (keys, constant, scale, of_out)
                assert of_lse <= 1e-6, (keys, constant, scale, of_lse)


@pytest.mark.parametrize("name", filled_variants(0.0))
@pytest.mark.parametrize("tile", [None, TileConfig(16, 64, 4, 2)], ids=["any", "portable"])
def test_filled_rows_are_the_mean_of_their_values(
    tile: TileConfig | None, name: str, cuda: Any
) -> None:
    for fill in FILLS if name != "a constant" else FILLS[-1:]:
        check_filled_rows(filled_variants(fill)[name], torch.bfloat16, tile=tile, device=cuda)
