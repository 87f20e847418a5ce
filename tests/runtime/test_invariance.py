"""`batch_invariant=True`: the bits of a request do not depend on its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.fused_sums import VARIANTS

import warploom as wl
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.bounds import Bounds

pytestmark = pytest.mark.optimised  # compilers fuse as they do for users


def make(**options: Any) -> AttentionWrapper:
    return AttentionWrapper(
        wl.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu",
        batch_invariant=True, **options,
    )  # fmt: skip


def tensors(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 4, 64, generator=generator)
    k, v = torch.randn(2, keys, 2, 64, generator=generator)
    return q, k, v


def test_invariant_wrappers_give_a_request_the_same_bits_among_any_neighbours() -> None:
    q, k, v = tensors(70, 9000)
    attention = make()
    attention.plan([0, 5], [0, 5000])
    alone = attention.run(q[:5], (k[:5000], v[:5000]))
    attention.plan([0, 5, 6, 70], [0, 5000, 5700, 9000])
    among = attention.run(q, (k, v))
    assert torch.equal(alone, among[:5])


def test_decoding_is_invariant_while_neighbours_come_and_go() -> None:
    """The same request alone, among 64, and after half of these have finished."""
    lengths = torch.randint(1, 300, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    lengths[40] = 5000  # cut, alone or not
    q, k, v = tensors(64, sum(lengths))
    ends = np.cumsum([0, *lengths])
    own = slice(ends[40], ends[41])
    attention = make(bounds=Bounds(64, 64, 5000))
    attention.plan(np.arange(65), ends)
    among = attention.run(q, (k, v))[40]
    attention.plan([0, 1], [0, 5000])
    assert torch.equal(attention.run(q[40:41], (k[own], v[own]))[0], among)
    attention.plan(np.arange(33), ends[32:] - ends[32])
    later = attention.run(q[32:], (k[ends[32] :], v[ends[32] :]))
    assert torch.equal(later[8], among)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_chunk(variant: wl.Variant) -> None:
    """The last row alone sees a tile that hides nothing, in another loop than that of a mask."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 2, 16, generator=generator)
    k, v = torch.randn(2, 64, 1, 16, generator=generator)
    attention = AttentionWrapper(
        variant & wl.Causal(), num_q_heads=2, num_kv_heads=1, head_dim=16, dtype="float32",
        device="cpu", batch_invariant=True, sm_scale=0.3,
    )  # fmt: skip
    attention.plan([0, 9], [0, 64])
    among = attention.run(q, (k, v))
    for rows in (1, 2, 5):
        attention.plan([0, rows], [0, 64])
        assert torch.equal(attention.run(q[-rows:], (k, v)), among[-rows:])


def test_one_long_request_takes_no_memory_for_the_rows_of_others() -> None:
    """512 prefills of 100 rows beside one row over 200,000 keys: 784 slots, and not 40,000."""
    attention = AttentionWrapper(
        wl.Causal(), num_q_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", device="cpu",
        batch_invariant=True,
    )  # fmt: skip
    qo_indptr = np.cumsum([0, *[100] * 512, 1])
    attention.plan(qo_indptr, np.cumsum([0, *[100] * 512, 200_000]))
    assert attention.planned is not None
    assert attention.planned.plan.num_slots == 8 * 98
    assert attention.planned.size.total < 256 << 20
