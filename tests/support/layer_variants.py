"""Functions that choose variants of vLLM's layers, where `VLLM_WARPLOOM_VARIANT` finds them."""

from __future__ import annotations

from typing import Any

import torch

import warploom as wl


def soft_capped(layer: Any) -> wl.Variant:
    """A tighter soft-cap than the model's, over the mask that each kind of layer has."""
    assert layer.index is not None and layer.model.model_type == "gemma2"
    capped = wl.SoftCap(2.0) & wl.Causal()
    return capped if layer.window is None else capped & wl.SlidingWindow(layer.window - 1)


def no_variant(layer: Any) -> Any:
    return layer.name


def without_values(layer: Any) -> wl.Variant:
    return wl.Alibi("input") & layer.variant  # slopes of one's own, which nobody gives


class RequestBias(wl.Variant):
    """Adds a number of each request."""

    bias = wl.Tensor("float32", ("batch",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.batch]


def by_request(layer: Any) -> wl.Variant:
    return RequestBias(bias=torch.zeros(8)) & layer.variant
