"""`batch_invariant=True`: the bits of a request do not depend on its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.fused_sums import VARIANTS

import warploom as wl
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds

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


BOTH = wl.TileConfig(48, 128, 1, 1, decode=wl.TileConfig(12, 64, 1, 1))
ODD = wl.TileConfig(24, 192, 1, 1, decode=wl.TileConfig(4, 64, 1, 1))  # 2,112 and 2,048 keys


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one request in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    ahead = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("tile", [BOTH, ODD], ids=["multiples", "rounded up"])
@pytest.mark.parametrize("sm_limit", [None, 1, 3])
def test_two_roles_give_each_request_the_same_bits_among_any_neighbours(
    tile: wl.TileConfig, sm_limit: int | None
) -> None:
    """Prefills and decodes alone, in batches of either role, and among both."""
    q_lens, kv_lens = [150, 1, 60, 2, 0, 1], [5000, 6200, 2300, 4500, 70, 90]
    q, k, v = tensors(sum(q_lens), sum(kv_lens))
    rows, keys = torch.split(q, q_lens), list(zip(k.split(kv_lens), v.split(kv_lens), strict=True))
    attention = make(tile=tile)

    def run(wrapper: AttentionWrapper, requests: list[int]) -> tuple[torch.Tensor, ...]:
        own = [q_lens[i] for i in requests]
        wrapper.plan(np.cumsum([0, *own]), np.cumsum([0, *(kv_lens[i] for i in requests)]))
        kv = tuple(torch.cat([keys[i][which] for i in requests]) for which in (0, 1))
        return torch.split(wrapper.run(torch.cat([rows[i] for i in requests]), kv), own)

    alone = [run(attention, [number])[0] for number in range(len(q_lens))]
    for number, found in enumerate(alone):
        expected = exact(rows[number], *keys[number])
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    limited = make(tile=tile, sm_limit=sm_limit)
    for requests in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 0], [3, 0, 3, 1, 1, 1]):
        for number, found in zip(requests, run(limited, requests), strict=True):
            assert torch.equal(found, alone[number]), (requests, number)
    assert limited.planned is not None
    assert set(limited.planned.plan.role) == {0, 1} and len(limited.planned.plan.merges) > 0


def test_each_role_has_the_bits_of_an_invariant_wrapper_with_its_tile_alone() -> None:
    assert ODD.decode is not None
    q, k, v = tensors(100, 9000)
    qo_indptr, kv_indptr = [0, 99, 100], [0, 4500, 9000]
    outputs = []
    for tile in (ODD, wl.TileConfig(24, 192, 1, 1), ODD.decode):
        attention = make(tile=tile)
        attention.plan(qo_indptr, kv_indptr)
        outputs.append(attention.run(q, (k, v)))
    both, prefills, decodes = outputs
    assert torch.equal(both[:99], prefills[:99]) and torch.equal(both[99:], decodes[99:])
    assert not torch.equal(both[:99], decodes[:99])


def test_two_roles_run_within_the_bounds_that_are_declared() -> None:
    bounds = Bounds(4, 100, 5000)
    attention, free = make(tile=BOTH, bounds=bounds), make(tile=BOTH)
    for q_lens in ([100], [1] * 4, [97, 1, 1, 1], []):
        kv_lens = [5000] * len(q_lens)
        q, k, v = tensors(sum(q_lens), sum(kv_lens))
        for wrapper in (attention, free):
            wrapper.plan(np.cumsum([0, *q_lens]), np.cumsum([0, *kv_lens]))
        assert torch.equal(attention.run(q, (k, v)), free.run(q, (k, v)))
