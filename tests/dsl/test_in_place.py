"""What would change a value in place is refused, and what torch's helpers read of one is there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import noop_mask

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, CannotTrace, FieldMisuse

Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 2, 8))


def scored(score: Any) -> wl.Variant:
    return wl.flex(lambda s, b, h, i, j: score(s))


@pytest.mark.parametrize(
    "score",
    [
        torch.sigmoid_,
        torch.exp_,
        lambda s: F.relu(s, inplace=True),
        lambda s: F.silu(s, True),
        lambda s: s.add_(1.0),
        lambda s: s.mul(2.0, alpha=3),
        lambda s: s.to(),
        lambda s: f"{s:.2f}",
    ],
)
def test_refused_in_both_readings(score: Any) -> None:
    with pytest.raises(CannotTrace):
        trace(scored(score))


def test_in_place_functions_are_refused_by_the_oracle_too() -> None:
    with pytest.raises(CannotTrace, match="in place"):
        reference_attention(scored(torch.sigmoid_), Q, K, V)


def test_what_traces_has_a_reading_in_numpy() -> None:
    plain, _ = reference_attention(None, Q, K, V)
    for score in (
        lambda s: s + 0.0 * math.floor(s) + 0.0 * math.ceil(s),
        lambda s: s + 0.0 * divmod(s, 3.0)[1],
        lambda s: s.to(torch.float32),
    ):
        trace(scored(score))
        np.testing.assert_allclose(reference_attention(scored(score), Q, K, V)[0], plain)
    unmasked = wl.flex(mask_mod=noop_mask)
    trace(unmasked)
    np.testing.assert_allclose(reference_attention(unmasked, Q, K, V)[0], plain)
    with pytest.raises(ArgumentError, match="flex"):
        reference_attention(lambda s: s, Q, K, V)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["name", "sm_scale", "layout", "q", "out", "kv_lens"])
def test_fields_leave_the_keywords_of_calls_alone(name: str) -> None:
    with pytest.raises(FieldMisuse, match="reserved"):
        type("Odd", (wl.Variant,), {name: wl.Scalar("float32")})


@pytest.mark.parametrize(
    "make",
    [
        lambda: wl.LinearScaling(0),
        lambda: wl.LinearScaling(-2.0),
        lambda: wl.YarnScaling(0, 4096),
        lambda: wl.YarnScaling(2.0, 4096, beta_fast=1.0, beta_slow=32.0),
        lambda: wl.YarnScaling(math.inf, 4096),
        lambda: wl.Llama3Scaling(original_length=0),
        lambda: wl.Llama3Scaling(low_freq_factor=4.0, high_freq_factor=1.0),
    ],
)
def test_scalings_that_give_no_frequencies_are_refused(make: Any) -> None:
    with pytest.raises(ArgumentError, match="above"):
        make()


def test_variants_have_no_complement() -> None:
    with pytest.raises(ArgumentError, match="no mask"):
        _ = ~wl.Causal()
