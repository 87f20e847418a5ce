"""Tensors that fill a block of memory, whatever the order of their axes."""

from __future__ import annotations

import torch

from warploom.prefetch_errors import HasGaps
from warploom.runtime.tensors.tensors import byte_span


def dense_bytes(tensor: torch.Tensor, name: str) -> int:
    """Bytes of a tensor without gaps; a transposed weight has none.

    Raises:
        HasGaps: there is memory of others between its elements.
    """
    size = tensor.numel() * tensor.element_size()
    if byte_span(tensor) != size:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        raise HasGaps(name=name, shape=shape, strides=strides)
    return size


def block_bytes(tensor: torch.Tensor, name: str) -> tuple[int, int]:
    """Bytes from entry to entry of the first axis, and bytes of an entry, which has no gaps.

    Raises:
        HasGaps: an entry has some.
    """
    step = tensor.stride(0) * tensor.element_size()
    if len(tensor) == 0:
        return step, 0
    return step, dense_bytes(tensor[0], f"a page of {name}")
