"""What users of FlexAttention write: torch's functions that trace, and what is refused instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors

TENSOR = torch.ones(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("x", r"is 'x'; expected a function \((score, )?b, h, q_idx, kv_idx\)"),
        (3, r"is 3; expected a function"),
        (TENSOR, r"is a Tensor of shape \(4, 4\), and no function\. .*PackedMask\(\*pack_masks\("),
        (np.ones((2, 4)), r"is a ndarray of shape \(2, 4\).* score \+ bias\[q_idx, kv_idx\]"),
        (wl.Causal(), "is a variant already; .* by &"),
        (wl.Causal, "is a variant already; .* by &"),
    ],
)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_what_is_no_function(kind: str, given: Any, text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^{kind}: {text}"):
        wl.flex(**{kind: given})
