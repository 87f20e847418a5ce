"""Masks whose classes of tiles are worked out from tensors say so: copies then walk by lanes."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.lowering.functors import variant_struct
from warploom.dsl.variants.trace import trace


class OfRequest(wl.Variant):
    ends = wl.Tensor("int32", ("batch",))

    def logits_mask(self, at: wl.Position) -> Any:
        return at.kv_pos < self.ends[at.batch]


class OfKey(wl.Variant):
    hidden = wl.Tensor("bool", ("batch", "kv_pos"))

    def logits_mask(self, at: wl.Position) -> Any:
        return ~self.hidden[at.batch, at.kv_pos]


@pytest.mark.parametrize(
    ("variant", "reads"),
    [
        (OfRequest(), True),
        (OfRequest() & wl.Causal(), True),
        (OfKey(), False),  # of a tile nothing is known
        (wl.Causal(), False),
        (wl.SlidingWindow(100), False),
    ],
    ids=["of a request", "and causal", "of each key", "causal", "window"],
)
def test_classes_that_read_say_so(variant: wl.Variant, reads: bool) -> None:
    assert ("kClassesRead = true" in variant_struct(trace(variant), "cuda")) == reads
