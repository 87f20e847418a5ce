"""Continuous batching of transformers by models that are small enough for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

HOW: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": -1,
    "pad_token_id": 0,
}

_untyped: Any = GenerationConfig


def batches(
    model: Any, given: list[list[int]], implementation: str, **options: Any
) -> list[list[int]]:
    """New tokens of each prompt, attended by a registered implementation.

    Four requests and 64 tokens in a step: prompts go in pieces, beside requests that decode.
    """
    model.set_attn_implementation(implementation)
    sizes: dict[str, Any] = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    found = model.generate_batch(
        inputs=given,
        generation_config=_untyped(**HOW),
        continuous_batching_config=ContinuousBatchingConfig(**(sizes | options)),
        progress_bar=False,
    )
    return [one.generated_tokens for one in sorted(found.values(), key=lambda one: one.request_id)]


def alone(model: Any, given: list[list[int]], implementation: str = "eager") -> list[list[int]]:
    """Each prompt by itself."""
    model.set_attn_implementation(implementation)
    asked = (torch.tensor([one]) for one in given)
    found = (model.generate(ids, attention_mask=torch.ones_like(ids), **HOW) for ids in asked)
    return [ids[0, len(one) :].tolist() for ids, one in zip(found, given, strict=True)]
