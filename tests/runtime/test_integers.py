"""Integers of functors have 32 bits and wrap: kernels, tile analysis and the oracle agree."""

from __future__ import annotations

import pytest
import torch
from support.integer_masks import CONDITIONS, Wraps, seen_by_attention, seen_by_functor


@pytest.mark.some(5)
@pytest.mark.parametrize("name", CONDITIONS)
def test_masks_beyond_32_bits(name: str) -> None:
    variant = Wraps(CONDITIONS[name])
    expected = seen_by_functor(variant).tolist()
    assert seen_by_attention(variant, "cpu", torch.float32) == expected
