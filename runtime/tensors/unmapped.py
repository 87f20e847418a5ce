"""Tensors that are addresses for more than there is memory, as those of virtual caches."""

from __future__ import annotations

import weakref

import torch

_ranges: dict[int, int] = {}  # bytes by first address


def may_lack_memory(holder: object, first: int, size: int) -> None:
    """Have it known that addresses have memory where something was written, and not in whole pages.

    Args:
        holder: lives as long as the addresses are reserved.
        first, size: of the addresses, in bytes.
    """
    _ranges[first] = size
    weakref.finalize(holder, _ranges.pop, first, None).atexit = False


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where pages may have no memory."""
    address = tensor.data_ptr()
    return any(first <= address < first + size for first, size in list(_ranges.items()))
