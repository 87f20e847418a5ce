"""States of attention with log-sum-exps in base 2, merged."""

from __future__ import annotations

from typing import Any

import torch

from warploom.runtime.calls.merge import merge_state as _merge_state
from warploom.runtime.calls.merge import merge_states as _merge_states


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states over disjoint keys; `warploom.merge_state` with `lse_base="2"`.

    Args:
        v_a, v_b: [rows, heads, dim], outputs, of one type.
        s_a, s_b: float32 [rows, heads], log-sum-exps in base 2.

    Returns:
        Output and log-sum-exp of all keys, shaped likewise.

    Raises:
        WrongShape, WrongDType, WrongDevice: tensors do not match.
    """
    return _merge_state(v_a, s_a, v_b, s_b, lse_base="2")


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: Any, s_other: Any, mask: Any = None
) -> None:
    """Merge another state into the first, which is overwritten.

    Args:
        v, s: [rows, heads, dim] and float32 [rows, heads], the state that is overwritten.
        v_other, s_other: the other, shaped likewise.
        mask: bools [rows], which rows to merge; all by default.

    Raises:
        WrongShape, WrongDType, WrongDevice: tensors do not match.
    """
    o, sums = _merge_state(v, s, v_other, s_other, lse_base="2")
    if mask is not None:
        taken = mask.bool()[:, None]
        o, sums = torch.where(taken[..., None], o, v), torch.where(taken, sums, s)
    v.copy_(o)
    s.copy_(sums)


def merge_states(v: Any, s: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states; `warploom.merge_states` with `lse_base="2"`.

    Args:
        v: [rows, states, heads, dim], outputs.
        s: float32 [rows, states, heads], log-sum-exps in base 2.

    Returns:
        Output [rows, heads, dim] and log-sum-exp [rows, heads] of all keys.

    Raises:
        WrongShape, WrongDType, WrongDevice: tensors do not match.
    """
    return _merge_states(v, s, lse_base="2")
