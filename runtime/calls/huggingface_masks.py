"""The mask function for transformers; imported only if transformers is installed."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers import masking_utils

_transformers: Any = masking_utils


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that transformers passes to every layer.

    Args:
        batch_size, q_length, kv_length: sizes.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: `(batch, head, q_idx, kv_idx) -> visible`.
        attention_mask: [batch, tokens] bool, False for padding.
        local_size: window or chunk of layers with local attention.
        **kwargs: further arguments of transformers' `sdpa_mask`.

    Returns:
        None if causality and window, which the layers know, define the mask. If keys are padded
        besides, [batch, kv_offset + kv_length] bool, whose last entries are the layers' keys, since
        generation may pass it back as `attention_mask`. Else [batch, 1, q_length, kv_length] bool.
    """
    function = mask_function or _transformers.causal_mask_function
    both_ways = function is _transformers.bidirectional_mask_function
    to_the_end = not isinstance(q_offset, torch.Tensor) and (
        q_offset + q_length == kv_offset + kv_length
    )
    if both_ways or (to_the_end and _is_causal(function, local_size)):
        padding = _transformers.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None:
            return None
        keep: torch.Tensor = padding[:, : kv_offset + kv_length].bool()
        is_whole = not torch.compiler.is_compiling() and bool(keep[:, kv_offset:].all())
        return None if is_whole else keep
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    full: torch.Tensor | None = _transformers.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )
    return full


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """True if the function is transformers' causal one, or its causal one within `window` keys."""
    if mask_function is _transformers.causal_mask_function:
        return True
    if window is None or torch.compiler.is_compiling():
        return False
    windowed = _transformers.sliding_window_causal_mask_function(window)
    return bool(_structure(mask_function) == _structure(windowed))


def closed_over(function: FunctionType) -> tuple[Any, ...]:
    """Values that a function closes over; None for empty cells."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the variable is not bound yet
            found.append(None)
    return tuple(found)


def _structure(value: Any, within: tuple[FunctionType, ...] = ()) -> Any:
    """A value that is equal for functions with the same code and the same closed-over values.

    transformers makes a new closure for each forward pass, so identity tells nothing. Comparing a
    few values of a mask would miss conditions that the model or the user has added to it.

    Args:
        value: a function, or a value that a function closes over.
        within: the functions around `value`, which `value` may close over itself.
    """
    if isinstance(value, tuple):
        return tuple(_structure(each, within) for each in value)
    if isinstance(value, FunctionType):
        if value in within:
            return within.index(value)
        return value.__code__, _structure(closed_over(value), (*within, value))
    return value if isinstance(value, int) else id(value)
