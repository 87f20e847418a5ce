"""Rows whose keys are all filled with large numbers, on the CPU back end."""

from __future__ import annotations

import pytest
import torch
from support.filled_rows import FILLS, check_filled_rows, filled_variants


@pytest.mark.parametrize("name", filled_variants(0.0))
def test_filled_rows_are_the_mean_of_their_values(name: str) -> None:
    for fill in FILLS if name != "a constant" else FILLS[-1:]:  # each constant is a kernel
        check_filled_rows(filled_variants(fill)[name], torch.bfloat16, device="cpu")
