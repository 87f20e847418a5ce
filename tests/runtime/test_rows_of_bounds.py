"""With `cuda_graph` runs take q with the rows of the bounds, which graphs are captured with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import WrongShape

SHAPE: dict[str, Any] = {
    "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32", "device": "cpu",
}  # fmt: skip
PAGED: dict[str, Any] = {**SHAPE, "kv_format": wl.Paged(4)}
BOUNDS = wl.Bounds(max_requests=4, max_q_rows=8, max_kv_len=64, max_blocks=16)
SMALL = ([0, 1, 3], [0, 2, 5], [3, 1, 4, 0, 2], [4, 3])
LARGE = ([0, 4, 8], [0, 2, 5], [3, 1, 4, 0, 2], [4, 3])
Q, CACHE = torch.randn(8, 4, 16), torch.randn(5, 2, 4, 2, 16)


def expected(batch: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    plain = wl.AttentionWrapper(wl.Causal(), **PAGED)
    plain.plan(*batch)
    return plain.run(Q[:rows], CACHE, return_lse=True)


def test_rows_behind_the_batch_stay_as_they_were() -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, cuda_graph=True, **PAGED)
    out, lse = torch.empty_like(Q), torch.empty(8, 4)
    for batch, rows in ((SMALL, 3), (LARGE, 8), (SMALL, 3)):
        wrapper.plan(*batch)
        for _ in range(2):
            out.fill_(7.0)
            lse.fill_(7.0)
            wrapper.run(Q, CACHE, out=out, lse=lse)
            torch.testing.assert_close((out[:rows], lse[:rows]), expected(batch, rows))
            assert (out[rows:] == 7.0).all() and (lse[rows:] == 7.0).all()
            made, sums = wrapper.run(Q, CACHE, return_lse=True)
            assert made.shape == Q.shape and sums.shape == (8, 4)
            torch.testing.assert_close((made[:rows], sums[:rows]), expected(batch, rows))
            own = wrapper.run(Q[:rows], CACHE, return_lse=True)  # those of the batch, by turns
            torch.testing.assert_close(own, expected(batch, rows))
    assert wrapper.explain().facts["batch"] == "2 requests, 3 query rows, 19 keys, longest 11"


def test_largest_scores_have_as_many_rows() -> None:
    wrapper = wl.AttentionWrapper(
        wl.Causal(), bounds=BOUNDS, cuda_graph=True, max_scores=True, **PAGED
    )
    wrapper.plan(*SMALL)
    out, aux = wrapper.run(Q, CACHE, return_aux=wl.AuxRequest(max_scores=True))
    assert aux.max_scores is not None and aux.max_scores.shape == (8, 4)
    torch.testing.assert_close(out[:3], expected(SMALL, 3)[0])


@pytest.mark.parametrize("rows", [2, 4, 7, 9])
def test_other_rows_are_refused(rows: int) -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), bounds=BOUNDS, cuda_graph=True, **PAGED)
    wrapper.plan(*SMALL)
    for _ in range(2):  # once more behind a run with the rows of the bounds
        with pytest.raises(WrongShape, match=r"q has shape .*; 3 is qo_indptr\[-1\]"):
            wrapper.run(torch.randn(rows, 4, 16), CACHE)
        wrapper.run(Q, CACHE)


@pytest.mark.parametrize("options", [{}, {"bounds": BOUNDS}])
def test_without_graphs_q_has_the_rows_of_the_batch(options: Any) -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), **options, **PAGED)
    wrapper.plan(*SMALL)
    with pytest.raises(WrongShape, match="q has shape"):
        wrapper.run(Q, CACHE)
