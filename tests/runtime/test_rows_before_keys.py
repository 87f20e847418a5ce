"""Rows that lie before the first key, as there are more queries than keys, index as torch does."""

from __future__ import annotations

from typing import Any

import torch

import warploom as wl

ADDED = torch.arange(10.0)
ROWS = torch.zeros(1, 4, 1, 8)
KEYS = torch.zeros(1, 2, 1, 8)  # so that positions of rows are -2, -1, 0 and 1


def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + ADDED[q_idx]


def few(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ADDED[q_idx] > 5


def test_captured_tensors_are_read_from_their_end() -> None:
    variant = wl.flex(add, q_idx="position")
    for backend in (None, "reference"):
        _, aux = wl.attention(
            ROWS, KEYS, KEYS, variant=variant, backend=backend,
            return_aux=wl.AuxRequest(max_scores=True),
        )  # fmt: skip
        assert aux.max_scores is not None
        assert aux.max_scores[0, :, 0].tolist() == ADDED[[-2, -1, 0, 1]].tolist(), backend


def test_and_so_are_those_of_masks() -> None:
    variant = wl.flex(None, few, q_idx="position")
    for backend in (None, "reference"):
        _, lse = wl.attention(ROWS, KEYS, KEYS, variant=variant, backend=backend, return_lse=True)
        assert isinstance(lse, torch.Tensor)
        assert lse[0, :, 0].isfinite().tolist() == [True, True, False, False], backend
