"""States of attention of several ranks: outputs and log-sum-exps, and what their merge is.

Both have heads first, so that what one rank sends another is contiguous, be it all heads or some;
kernels write them in that order, and nothing is copied before it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.errors import NoGradient

_LEAST = torch.finfo(torch.float32).min


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


def merged_out(states: States, softmax: bool) -> torch.Tensor:
    """Outputs of all ranks, along the first axis, as one, in float32.

    Without softmax they are added. In few launches: a step of decoding has nothing else to do
    meanwhile.
    """
    if not softmax:
        return states.out.float().sum(0)
    weights = torch.softmax(states.lse, 0).masked_fill_(states.lse == -math.inf, 0.0)
    return (states.out * weights[..., None]).sum(0)


def merged_lse(states: States, softmax: bool) -> torch.Tensor:
    """Log-sum-exps of all ranks, along the first axis, as one; 0 without softmax."""
    return states.lse.logsumexp(0) if softmax else torch.zeros_like(states.lse[0])


def with_more(before: States | None, more: States, softmax: bool) -> States:
    """The state so far [rows, heads, ...] in float32, and one of other keys.

    Both may be of gigabytes, so this goes over them twice, where `merge_states` does many times. An
    output that is infinite, since values were or overflowed, may become NaN.
    """
    if before is None:
        return States(more.out.float(), more.lse)
    if not softmax:
        return States(before.out + more.out, before.lse)
    # by the difference, which is exact where the sum is rounded; 0 where neither has seen a key
    share = torch.sigmoid(more.lse - before.lse.clamp_min(_LEAST))
    out = torch.lerp(before.out, more.out.float(), share[..., None])
    return States(out, torch.logaddexp(before.lse, more.lse))


class _NoBackward(torch.autograd.Function):
    """Results of exchanges, which no gradient goes back through."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: torch.Tensor) -> Any:
        # no views of what came in, which could not be written to in place
        return tuple(x.detach() for x in given[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NoGradient


def without_gradient(
    results: tuple[torch.Tensor, ...], learnt: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results; a backward pass from them to what wants a gradient raises NoGradient."""
    if not learnt:
        return results
    apply: Any = _NoBackward.apply  # which is not typed
    found: tuple[torch.Tensor, ...] = apply(len(results), *results, *learnt)
    return found
