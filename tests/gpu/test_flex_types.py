"""Captured tensors of small types on a GPU, and what is looked at there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.typed_mods import MODS, ROWS, scored

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.errors import ArgumentError

pytestmark = pytest.mark.gpu


def inputs(cuda: Any) -> list[torch.Tensor]:
    return [torch.randn(1, ROWS, 2, 64, device=cuda).half() for _ in range(3)]


@pytest.mark.parametrize("name", MODS)
def test_score_mods_compute_what_the_oracle_computes(name: str, cuda: Any) -> None:
    variant = wl.flex(scored(MODS[name]))
    q, k, v = inputs(cuda)
    expected, _ = reference_attention(variant, q[0].cpu(), k[0].cpu(), v[0].cpu())
    found = wl.attention(q, k, v, variant=variant)
    np.testing.assert_allclose(found[0].float().cpu(), expected, atol=1e-2)


def test_masks_wrap_in_kernels_and_their_analysis(cuda: Any) -> None:
    first = torch.tensor([250], dtype=torch.uint8, device=cuda)
    variant = wl.flex(None, lambda b, h, i, j: j >= first[b] + 10)  # from 4 on
    q, k, v = inputs(cuda)
    plain = wl.attention(q, k[:, 4:], v[:, 4:])
    torch.testing.assert_close(wl.attention(q, k, v, variant=variant), plain)


def test_long_values_beyond_int32_are_refused_where_they_are_seen(cuda: Any) -> None:
    ids = torch.arange(ROWS, device=cuda)
    variant = wl.flex(None, lambda b, h, i, j: ids[i] >= ids[j])
    q, k, v = inputs(cuda)
    causal = wl.attention(q, k, v, variant=wl.Causal())
    torch.testing.assert_close(wl.attention(q, k, v, variant=variant), causal)
    ids += 2**40
    with pytest.raises(ArgumentError, match=r"its value 1099511627776 at \[0\] does not fit"):
        wl.attention(q, k, v, variant=variant)
