"""Masks of sequences that lie one behind the other, made only for layers that read them.

transformers takes a step of continuous batching for such a pack, and would make [rows, rows] of it.
The layers know better: they are told where requests begin.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers import masking_utils

from warploom.runtime.calls.huggingface_masks import closed_over, make_mask

_transformers: Any = masking_utils
_PACKED = _transformers.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_CAUSAL = _transformers.causal_mask_function.__code__
_WINDOW = _transformers.sliding_window_overlay(1).__code__
_ALL_OF = _transformers.and_masks().__code__


class MaskOnDemand:
    """A mask in the form of what it is made of."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._made: tuple[torch.Tensor | None] | None = None

    def is_known(self, window: int | None) -> bool:
        """Whether it says no more than sequences, causality and a layer's window, if it has one."""
        compiled = torch.compiler.is_compiling()  # functions do not tell what they are joined of
        return not compiled and _is_known(self._arguments.get("mask_function"), window)

    def made(self) -> torch.Tensor | None:
        """As `make_mask` returns it, once for all layers."""
        if self._made is None:  # no cached_property: its lock is not compiled
            self._made = (make_mask(**self._arguments),)
        return self._made[0]


def make_mask_or_none(**arguments: Any) -> torch.Tensor | MaskOnDemand | None:
    """`make_mask`, later for packed sequences; takes what that takes, by name.

    In models that are compiled functions do not tell what they are joined of, so that all masks
    without padding are made later.
    """
    if arguments.get("attention_mask") is None and (
        torch.compiler.is_compiling() or _is_packed(arguments.get("mask_function"))
    ):
        return MaskOnDemand(arguments)
    return make_mask(**arguments)


def _is_packed(function: Callable[..., Any] | None, within: tuple[FunctionType, ...] = ()) -> bool:
    """True if the function, or one that it is joined of, tells packed sequences apart.

    Args:
        function: of a mask.
        within: the functions around it, which it may close over itself.
    """
    if not isinstance(function, FunctionType) or function in within:
        return False
    if function.__code__ is _PACKED:
        return True
    held = closed_over(function)
    parts = [part for one in held for part in (one if isinstance(one, tuple) else (one,))]
    return any(_is_packed(part, (*within, function)) for part in parts)


def _is_known(function: Callable[..., Any] | None, window: int | None) -> bool:
    if not isinstance(function, FunctionType):
        return False
    if function.__code__ is _WINDOW:
        return closed_over(function) == (window,)
    if function.__code__ is not _ALL_OF:
        return function.__code__ in (_PACKED, _CAUSAL)
    (parts,) = closed_over(function)
    return isinstance(parts, tuple) and all(_is_known(part, window) for part in parts)
