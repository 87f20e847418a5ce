"""Mods as users of FlexAttention write them: torch's own eager result, and ours on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import warploom as wl

F = torch.nn.functional
BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 70, 90, 16
NEAR_ZERO = torch.tensor([0.0, 1e-6, -1e-6, 4e-6, -3e-5, 2e-5])
HOLES = torch.tensor([0.0, 1.0, -2.0, float("nan"), float("inf"), -float("inf"), 0.5])


def _score(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A score_mod from a function of the score and of the distance of query and key."""
    return lambda score, b, h, q_idx, kv_idx: function(score, (q_idx - kv_idx) * 0.1)


SCORES: dict[str, Callable[..., Any]] = {
    "log1p": _score(lambda s, d: s + torch.log1p(torch.abs(s)) - d.abs().log1p()),
    "log1p near 0": lambda s, b, h, q, k: s + torch.log1p(NEAR_ZERO[k % 6]) * 1e5,
    "expm1": _score(lambda s, d: torch.expm1(-torch.abs(s)) + s.clamp(-2, 2).expm1()),
    "expm1 near 0": lambda s, b, h, q, k: s + torch.expm1(NEAR_ZERO[k % 6]) * 1e5,
    "fmod": _score(lambda s, d: torch.fmod(d, 1.75) + d.fmod(-0.5) + s),
    "fmod of ints": lambda s, b, h, q, k: s + torch.fmod(q - k, 7) * 0.1 + (k - q).fmod(-3),
    "tan": _score(lambda s, d: s + torch.tan(d * 0.1) + (s * 0.1).tan()),
    "atan": _score(lambda s, d: torch.atan(s) + d.atan() + torch.arctan(d)),
    "sinh": _score(lambda s, d: torch.sinh(s.tanh()) + (d * 0.01).sinh()),
    "cosh": _score(lambda s, d: torch.cosh(s.tanh()) - (d * 0.2).cosh()),
    "softplus": _score(lambda s, d: F.softplus(s) - F.softplus(d, beta=2.0, threshold=5.0)),
    "elu": _score(lambda s, d: F.elu(s) + F.elu(d, alpha=0.7)),
    "leaky_relu": _score(lambda s, d: F.leaky_relu(s) + F.leaky_relu(d, 0.3)),
    "selu": _score(lambda s, d: F.selu(s) + F.celu(d, alpha=0.7) + F.mish(s)),
    "shrinking": _score(lambda s, d: F.tanhshrink(s) + F.softshrink(d) + F.hardshrink(s)),
    "hard": _score(lambda s, d: F.hardtanh(s) + F.relu6(d) + F.hardsigmoid(s) + F.hardswish(d)),
    "softsign": _score(lambda s, d: F.softsign(s) + F.threshold(d, 0.3, -0.25)),
    "lerp": _score(lambda s, d: torch.lerp(s, d, 0.3) + d.lerp(s, 0.9)),
    "lerp by a value": _score(lambda s, d: torch.lerp(s, d, torch.sigmoid(s))),
    "max and min": _score(lambda s, d: torch.max(s, d) + torch.min(s, d * 2) + s.max(d)),
    "maximum": _score(lambda s, d: torch.maximum(s, d) + torch.minimum(s, d * 2) + s.min(d)),
    "isnan": lambda s, b, h, q, k: torch.where(torch.isnan(HOLES[k % 7]), s * 2, s),
    "isinf": lambda s, b, h, q, k: torch.where(HOLES[k % 7].isinf(), -float("inf"), s),
}
LARGE = torch.tensor([1e9, 2.0**25 + 4, -(2.0**30), 1e20, -5.0, 123456.78, 7.0, -0.1])
OF_NAN = {  # each is a number where torch has one, and else tells that it is none
    "maximum": lambda x, d: torch.maximum(x, d) + torch.minimum(d, x),
    "max": lambda x, d: torch.max(x, d) - d.min(x) + x.clamp(-1.0, 1.0),
    "clamp": lambda x, d: torch.clamp(d, min=x) + torch.clamp(x, max=0.5) + torch.relu(x),
    "remainder": lambda x, d: x % d + torch.remainder(d, x),
    "floor division": lambda x, d: x // (d + 0.05) + d // x,
}


def _told(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        x = function(HOLES[k % 7], (q - 9) * 0.5)
        return s + torch.where(torch.isnan(x), 3.0, x.clamp(-2.0, 2.0))

    return score


SCORES |= {f"{name} of NaN": _told(function) for name, function in OF_NAN.items()}
SCORES |= {
    "remainder of large numbers": lambda s, b, h, q, k: (
        s + (LARGE[k % 8] % LARGE[q % 8]).clamp(-2.0, 2.0) + LARGE[k % 8] % 97.0 * 0.01
    ),
    "floor division that rounds up": lambda s, b, h, q, k: s + (q * 1.0) // 0.1 * 0.01,
}
MASKS: dict[str, Callable[..., Any]] = {
    "fmod": lambda b, h, q, k: (torch.fmod(q - k, 5) >= 0) & (q >= k),
    "log1p": lambda b, h, q, k: torch.log1p(torch.abs(q - k) * 0.3) < 2.0,
    "expm1": lambda b, h, q, k: torch.expm1((q - k) * 0.05) >= 0.0,
    "atan": lambda b, h, q, k: torch.atan((q - k) * 0.1) > 0.7,
    "sinh": lambda b, h, q, k: torch.sinh((q - k) * 0.05) > -1.3,
    "cosh": lambda b, h, q, k: torch.cosh((q - k) * 0.05) < 2.3,
    "tan": lambda b, h, q, k: torch.tan((q - k) * 0.05) > 0.1,
    "isnan": lambda b, h, q, k: torch.isnan(HOLES[k % 7]) | (q >= k),
    "isinf": lambda b, h, q, k: ~HOLES[k % 7].isinf(),
    "isfinite": lambda b, h, q, k: torch.isfinite(HOLES[(k + h) % 7]),
    "max": lambda b, h, q, k: torch.max(q, k) - torch.min(q, k) <= 9,
    "softplus": lambda b, h, q, k: F.softplus((q - k) * 0.1) > 0.3,
    "leaky_relu": lambda b, h, q, k: F.leaky_relu((q - k) * 0.1) > -0.13,
    "elu": lambda b, h, q, k: F.elu((q - k) * 0.1) > -0.77,
    "lerp": lambda b, h, q, k: torch.lerp(q * 1.0, k * 1.0, 0.4) < 40.05,
    "remainder": lambda b, h, q, k: ((q - k) * 0.37 % 1.3 < 0.6) | ((k - q) * 0.11 % -0.7 > -0.2),
    "floor division": lambda b, h, q, k: (q - k) * 0.13 // 0.3 >= -4.0,
    "maximum of NaN": lambda b, h, q, k: ~(torch.maximum(HOLES[k % 7], q * 0.1) > 2.05),
    "minimum of NaN": lambda b, h, q, k: torch.minimum((q - k) * 0.1, HOLES[h + 2]) <= 0.35,
}


def compare(score_mod: Any, mask_mod: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(BATCH, HEADS, ROWS, DIM, generator=generator)
    k, v = torch.randn(2, BATCH, HEADS, KEYS, DIM, generator=generator)
    mask = None
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(mask_mod, BATCH, HEADS, ROWS, KEYS, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch_flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
    found = wl.attention(q, k, v, variant=wl.flex(score_mod, mask_mod), layout="HND")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# a kernel takes seconds to compile: each has a score and a mask
@pytest.mark.some(5)
@pytest.mark.parametrize(("score", "mask"), [*zip_longest(SCORES, MASKS)])
def test_mods_agree_with_torch(score: str, mask: str | None) -> None:
    compare(SCORES[score], MASKS[mask] if mask else None)
