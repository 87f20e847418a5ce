"""Integers that do not fit 32 bits wrap on a GPU as in the functor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.integer_masks import CONDITIONS, Wraps, seen_by_attention, seen_by_functor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CONDITIONS)
def test_masks_beyond_32_bits(cuda: Any, name: str) -> None:
    variant = Wraps(CONDITIONS[name])
    expected = seen_by_functor(variant).tolist()
    assert seen_by_attention(variant, cuda, torch.float16) == expected
