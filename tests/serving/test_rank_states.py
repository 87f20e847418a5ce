"""States of ranks become one as `merge_states` makes them one, in fewer launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import warploom as wl
from warploom.serving.distributed.states import States, merged_lse, merged_out, with_more

NUMBERS = (-math.inf, -80.0, -1.0, 0.0, 3.0, 90.0)
SPECIAL = (*NUMBERS, math.inf, math.nan)


def states(lses: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> States:
    """Of [ranks, rows] log-sum-exps, one head, with outputs as attention leaves them.

    They are zeros where no key was seen, and NaN where the log-sum-exp is infinite or NaN.
    """
    lse = torch.tensor(lses)[:, None]
    rng = torch.Generator().manual_seed(len(lses))
    out = torch.randn((*lse.shape, 4), generator=rng).to(dtype)
    rows = lse[..., None]
    out = out.masked_fill(rows == -math.inf, 0.0).masked_fill(~(rows < math.inf), math.nan)
    return States(out, lse)


def merged(given: States) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [heads, rows, ...], by the public function, which has ranks behind rows."""
    out, lse = wl.merge_states(given.out.double().movedim(0, -3), given.lse.movedim(0, -2))
    return out, lse


def check(out: torch.Tensor, lse: torch.Tensor, given: States) -> None:
    expected = merged(given)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(lses=st.integers(1, 5).flatmap(
    lambda rows: st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * rows), min_size=1, max_size=4)
))  # fmt: skip
def test_of_all_ranks(dtype: torch.dtype, lses: list[tuple[float, ...]]) -> None:
    every = states(lses, dtype)
    check(merged_out(every, True), merged_lse(every, True), every)


@given(lses=st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * 3), min_size=1, max_size=4))
def test_one_after_another(lses: list[tuple[float, ...]]) -> None:
    every = states(lses)
    found = None
    for out, lse in zip(*every, strict=True):
        found = with_more(found, States(out, lse), True)
    assert found is not None
    check(*found, every)


def test_without_softmax_they_are_added() -> None:
    every = states([[0.0, 0.0], [0.0, 0.0]], torch.bfloat16)
    expected = every.out.float().sum(0)
    assert torch.equal(merged_out(every, False), expected)
    assert not merged_lse(every, False).any()
    first, second = (States(*one) for one in zip(*every, strict=True))
    assert torch.equal(with_more(with_more(None, first, False), second, False).out, expected)
