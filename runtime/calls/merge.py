"""States of attention over disjoint keys, merged into the state over all of them.

The state of a row is its output and its log-sum-exp. The weight of each state follows from the
log-sum-exps alone, so several calls, devices or machines can each attend over a part of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from warploom.errors import ArgumentError, WrongDevice, WrongDType, WrongShape
from warploom.runtime.declaring.declare import checked_lse_scale
from warploom.runtime.tensors.tensors import as_torch

_Function = Callable[[torch.Tensor], torch.Tensor]
_EMPTY = -math.inf  # log-sum-exp of no keys


def merge_state(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, *, lse_base: str = "e"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states of attention, each over a part of the keys, into the state over both parts.

    It runs torch operators on the tensors' device, so it can be captured in CUDA graphs, compiled
    and differentiated. It computes in float32 (float64 for float64).

    Args:
        v_a: [rows, heads, dim], the first output; other axes before `dim` are accepted, too, such
            as [batch, heads, rows, dim]. Any float type.
        s_a: log-sum-exp of the first state, shaped like v_a without `dim`; -inf where no key was
            seen, and v_a is then ignored.
        v_b, s_b: output and log-sum-exp of the second state, shaped like v_a and s_a.
        lse_base: "e" or "2", base of the log-sum-exps, as in the wrapper's `lse_base`.

    Returns:
        The output in v_a's type, and the log-sum-exp in float32 (float64 if s_a or s_b is float64).
        They are 0 and -inf where both states are empty; NaN and inf where a log-sum-exp is inf and
        none is NaN, as attention over both parts would give; NaN and NaN where one is NaN.

    Raises:
        WrongShape, WrongDType, WrongDevice: tensors do not match.
        ArgumentError: no such base.
    """
    v_a, s_a, v_b, s_b = _tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    _check(("v_a", v_a), ("s_a", s_a))
    _check(("v_b", v_b), ("s_b", s_b))
    if v_b.shape != v_a.shape:
        raise WrongShape(name="v_b", got=tuple(v_b.shape), expected=f"{tuple(v_a.shape)}, as v_a")
    _check_alike("v_b", v_b, v_a, "v_a")
    v, s = (torch.stack((_wide(a), _wide(b))) for a, b in ((v_a, v_b), (s_a, s_b)))
    merged, sums = _merged(v, s, 0, lse_base)
    return merged.to(v_a.dtype), sums


def merge_states(v: Any, s: Any, *, lse_base: str = "e") -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states of attention, each over a part of the keys, like `merge_state`.

    Args:
        v: [rows, num_states, heads, dim], the outputs; more axes may come first.
        s: [rows, num_states, heads], the log-sum-exps.
        lse_base: "e" or "2", base of the log-sum-exps.

    Returns:
        The output [rows, heads, dim] in v's type, and the log-sum-exp [rows, heads] in float32
        (float64 if s is float64). They are 0 and -inf where all states are empty, or if there are
        no states; inf and NaN follow the rules of `merge_state`.

    Raises:
        WrongShape, WrongDType, WrongDevice: tensors do not match.
        ArgumentError: no such base, or states were given as a list.
    """
    for name, states in (("v", v), ("s", s)):
        if isinstance(states, (list, tuple)) and any(torch.is_tensor(one) for one in states):
            reason = f"is a {type(states).__name__} of tensors; states are an axis of one tensor"
            raise ArgumentError(name=name, reason=f"{reason}: give torch.stack({name}, 1)")
    v, s = _tensors(v=v, s=s)
    if v.dim() < 3:
        expected = "[rows, num_states, heads, dim]"
        raise WrongShape(name="v", got=tuple(v.shape), expected=expected)
    _check(("v", v), ("s", s))
    merged, sums = _merged(_wide(v), _wide(s), v.dim() - 3, lse_base)
    return merged.to(v.dtype), sums


def _merged(
    v: torch.Tensor, s: torch.Tensor, axis: int, lse_base: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge all states along an axis. Operands of a possible inf - inf are replaced first."""
    exp, log = _functions(lse_base)
    if v.shape[axis] == 0:  # amax needs an element; one empty state gives the same result
        one = (*s.shape[:axis], 1, *s.shape[axis + 1 :])
        v, s = v.new_zeros((*one, v.shape[-1])), s.new_full(one, _EMPTY)
    greatest = s.detach().amax(axis, keepdim=True)  # it cancels out, so it needs no gradient
    # Infinity is not subtracted: its weight is infinite, and finite log-sum-exps get weight 0.
    s = torch.where((greatest == math.inf) & (s < math.inf), _EMPTY, s)
    greatest = torch.where(greatest.abs() == math.inf, 0.0, greatest)
    weights = exp(s - greatest)
    total = weights.sum(axis)
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    weights = (weights / total.unsqueeze(axis)).unsqueeze(-1)
    counted = torch.where(weights == 0, 0.0, v)  # an empty state may hold NaN
    return (weights * counted).sum(axis), torch.where(
        is_empty, _EMPTY, log(total) + greatest.squeeze(axis)
    )


def _functions(lse_base: str) -> tuple[_Function, _Function]:
    """The base's exponential and logarithm."""
    checked_lse_scale(lse_base)
    return (torch.exp, torch.log) if lse_base == "e" else (torch.exp2, torch.log2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that merges compute in."""
    return x if x.dtype == torch.float64 else x.float()


def _tensors(**given: Any) -> list[torch.Tensor]:
    return [x if isinstance(x, torch.Tensor) else as_torch(x, name) for name, x in given.items()]


def _check(value: tuple[str, torch.Tensor], sums: tuple[str, torch.Tensor]) -> None:
    """Check an output and its log-sum-exp, each with its name."""
    (v_name, v), (s_name, s) = value, sums
    for name, x in (value, sums):
        if not x.is_floating_point():
            raise WrongDType(name=name, got=str(x.dtype), expected="a type of floats")
    if v.dim() == 0 or s.shape != v.shape[:-1]:
        expected = f"{tuple(v.shape[:-1])}, as {v_name} without its last axis"
        raise WrongShape(name=s_name, got=tuple(s.shape), expected=expected)
    if s.device != v.device:
        raise WrongDevice(name=s_name, got=str(s.device), expected=str(v.device))


def _check_alike(name: str, x: torch.Tensor, first: torch.Tensor, first_name: str) -> None:
    if x.device != first.device:
        raise WrongDevice(name=name, got=str(x.device), expected=str(first.device))
    if x.dtype != first.dtype:
        expected = f"{first.dtype}, as {first_name}"
        raise WrongDType(name=name, got=str(x.dtype), expected=expected)
