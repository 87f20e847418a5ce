"""Sequences one behind the other with a mask that says more than where they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from transformers import masking_utils

from warploom.engines.transformers.continuous import attention_forward
from warploom.engines.transformers.masks import MaskOnDemand, make_mask_or_none

LENGTHS = (5, 9, 2)
ROWS = sum(LENGTHS)
_masks: Any = masking_utils
SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def even_keys(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 2 == 0


def first_key(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx == 0


def packed() -> Callable[..., Any]:
    function: Callable[..., Any] = _masks.and_masks(
        _masks.causal_mask_function, _masks.packed_sequence_mask_function(SEQUENCE[None])
    )
    return function


@pytest.mark.parametrize(
    ("function", "window", "is_known"),
    [
        (packed(), None, True),
        (_masks.and_masks(packed(), _masks.sliding_window_overlay(4)), 4, True),
        (_masks.and_masks(packed(), _masks.sliding_window_overlay(4)), None, False),
        (_masks.and_masks(packed(), even_keys), None, False),
        (_masks.or_masks(packed(), first_key), None, False),
    ],
    ids=["packed", "window", "a window the layer lacks", "and another", "or another"],
)
def test_nothing_of_the_mask_is_lost(
    function: Callable[..., Any], window: int | None, is_known: bool
) -> None:
    """With `cu_seq_lens_q`, by which kernels of FlashAttention's kind get sequences alone."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, ROWS, 32) for heads in (4, 2, 2))
    mask = make_mask_or_none(
        batch_size=1, q_length=ROWS, kv_length=ROWS, q_offset=0, kv_offset=0,
        mask_function=function, attention_mask=None, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    assert isinstance(mask, MaskOnDemand) and mask.is_known(window) == is_known
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    module = torch.nn.Module()
    found, _ = attention_forward(
        module, query, key, value, mask, sliding_window=window, cu_seq_lens_q=ends
    )
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    seen = function(0, 0, rows, keys)
    repeated = [x.double().repeat_interleave(2, 1) for x in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), *repeated, attn_mask=seen
    )
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
