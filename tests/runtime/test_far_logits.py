"""Large logits: no reference that is a rounded product may take all weights with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emulator import Emulator
from support.far_logits import Doubled, errors_of_far_logits

import warploom as wl
from warploom.codegen.source import TileConfig

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.some(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (5, 300), (70, 513), (1, 20_000), (2, 9000)])
@pytest.mark.parametrize("variant", [None, Doubled()], ids=["plain", "transformed"])
def test_ties_and_maxima_of_far_logits(rows: int, keys: int, dtype: Any, variant: Any) -> None:
    torch.manual_seed(rows + keys)
    for constant in (None, 100.0) if keys < 1000 else (None,):
        found = errors_of_far_logits(rows, keys, (4, 2), dtype, "cpu", variant, constant)
        for scale, (of_out, of_lse) in found.items():
            assert of_out <= DTYPES[dtype], (scale, constant, of_out)
            assert of_lse <= 1e-6, (scale, constant, of_lse)


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", [(64, 64, 4, 2, "hopper", 2), (128, 128, 8, 2, "hopper", 1)])
@pytest.mark.parametrize("keys", [300, 3000])  # by one CTA, and split
def test_far_logits_of_kernels_for_hopper(emulator: Emulator, tile: Any, keys: int) -> None:
    torch.manual_seed(0)
    q, k = (torch.randint(-2, 3, (n, 2, 64)).half() for n in (70, keys))
    v = torch.randn(keys, 2, 64).half()
    wrapper = wl.AttentionWrapper(
        kv_format=wl.Ragged(), num_q_heads=2, head_dim=64, dtype="float16", device="cpu",
        tile=TileConfig(*tile), sm_scale=1e9,
    )  # fmt: skip
    wrapper.plan([0, 70], [0, keys])
    planned = wrapper.planned
    assert planned is not None and (len(planned.plan.merges) > 0) == (keys > 300)
    logits = torch.einsum("rhd,khd->hrk", q.double(), k.double()) * 1e9
    expected = torch.einsum("hrk,khd->rhd", torch.softmax(logits, -1), v.double())
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=0.0)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1).T, atol=0.0, rtol=1e-6)
