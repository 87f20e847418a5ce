"""States of attention of several ranks: outputs and log-sum-exps, and what their merge is.

Both have heads first, so that what one rank sends another is contiguous, be it all heads or some;
kernels write them in that order, and nothing is copied before it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.errors import NoGradient
from warploom.runtime.calls.merge import merge_states


class States(NamedTuple):
    """One state for each head and row, of one rank or of each.

    Attributes:
        out: outputs [..., heads, rows..., head_dim].
        lse: float32 log-sum-exps [..., heads, rows...].
    """

    out: torch.Tensor
    lse: torch.Tensor


def empty_states(
    shape: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> States:
    """Memory for states of the shape [..., heads, rows...]."""
    out = torch.empty((*shape, head_dim), dtype=dtype, device=device)
    return States(out, torch.empty(tuple(shape), dtype=torch.float32, device=device))


def bytes_per_state(head_dim: int, element: int) -> int:
    """What is sent of one row and head, whose output has elements of so many bytes."""
    return head_dim * element + 4


def merged_ranks(states: States, softmax: bool) -> States:
    """One state of those of all ranks, along the first axis, in float32.

    Without softmax states are outputs, and these are added.
    """
    if not softmax:
        return States(states.out.float().sum(0), torch.zeros_like(states.lse[0]))
    # which axes count as rows and which as heads is all the same to a merge
    return States(*merge_states(states.out.float().movedim(0, -3), states.lse.movedim(0, -2)))


def with_more(before: States | None, more: States, softmax: bool) -> States:
    """The state so far [rows, heads, ...] in float32, and one of other keys."""
    if before is None:
        return States(more.out.float(), more.lse)
    if not softmax:
        return States(before.out + more.out, before.lse)
    both = torch.stack((before.out, more.out.float()), 1), torch.stack((before.lse, more.lse), 1)
    return States(*merge_states(*both))


class _NoBackward(torch.autograd.Function):
    """Results of exchanges, which no gradient goes back through."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, lse: torch.Tensor, *_: torch.Tensor) -> Any:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NoGradient


def without_gradient(
    results: tuple[torch.Tensor, torch.Tensor], learnt: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results; a backward pass from them to what wants a gradient raises NoGradient."""
    if not learnt:
        return results
    apply: Any = _NoBackward.apply  # which is not typed
    found: tuple[torch.Tensor, torch.Tensor] = apply(*results, *learnt)
    return found
