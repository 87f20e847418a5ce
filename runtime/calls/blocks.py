"""Boolean masks and torch's sparse_bsr tensors as block rows, ready for `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from warploom.dsl.library.packed_mask import mask_bits
from warploom.errors import ArgumentError, WrongShape
from warploom.runtime.declaring.declare import checked_count
from warploom.runtime.tensors.tensors import host_array

_Array = np.ndarray[Any, Any]


def block_rows(masks: Any, block: tuple[int, int] | None = None) -> dict[str, Any]:
    """The arguments of `plan` for `BlockSparse(block)`, from one mask for each request.

    Args:
        masks: a mask, or a list with one for each request. A mask is a boolean array [queries,
            keys], in which every block is all True or all False (the last blocks may be cut), or a
            torch.sparse_bsr tensor, whose stored blocks are visible regardless of their values.
        block: (queries, keys) of a block; a sparse_bsr tensor has its own block size.

    Returns:
        qo_indptr, kv_indptr, kv_indices and kv_lens; call `plan(**block_rows(...))`.

    Raises:
        ArgumentError: a block is mixed (take smaller blocks, or a mask in the variant), no block
            size is given, sizes differ between requests, or a mask is additive.
        WrongShape: a mask does not have two dimensions.
    """
    is_list = isinstance(masks, (list, tuple))
    given: Sequence[Any] = masks if is_list else [masks]
    names = [f"masks[{i}]" if is_list else "the mask" for i in range(len(given))]
    parts = [
        _bsr_rows(mask, block) if _is_bsr(mask) else _mask_rows(name, mask, block)
        for name, mask in zip(names, given, strict=True)
    ]
    rows = np.concatenate([counts for counts, _, _ in parts] or [np.zeros(0, int)])
    return {
        "qo_indptr": _indptr([shape[0] for _, _, shape in parts]),
        "kv_indptr": _indptr(rows),
        "kv_indices": np.concatenate([np.zeros(0, int), *(c for _, c, _ in parts)]).astype(
            np.int32
        ),
        "kv_lens": np.array([shape[1] for _, _, shape in parts], np.int32),
    }


def _is_bsr(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.layout is torch.sparse_bsr


def _mask_rows(
    name: str, mask: Any, block: tuple[int, int] | None
) -> tuple[_Array, _Array, tuple[int, ...]]:
    """(blocks in each block row, their columns, shape) of a boolean mask."""
    array = host_array(mask, "masks")
    if block is None:
        raise ArgumentError(name="block", reason="a boolean mask needs the block size")
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise ArgumentError(name="block", reason=f"is {block!r}; expected (queries, keys)")
    for side in block:
        checked_count("block", side)
    if array.ndim != 2:
        raise WrongShape(name="masks", got=tuple(array.shape), expected="[queries, keys]")
    array = mask_bits(name, array)
    starts = [np.arange(0, size, step) for size, step in zip(array.shape, block, strict=True)]
    seen = np.add.reduceat(array.astype(np.int64), starts[0], axis=0) if array.size else array
    seen = np.add.reduceat(seen, starts[1], axis=1) if array.size else np.zeros((0, 0), int)
    heights, widths = (
        np.minimum(step, size - start)
        for start, size, step in zip(starts, array.shape, block, strict=True)
    )
    if array.size and ((seen > 0) & (seen < np.outer(heights, widths))).any():
        at = np.argwhere((seen > 0) & (seen < np.outer(heights, widths)))[0].tolist()
        raise ArgumentError(
            name="masks",
            reason=f"block {tuple(at)} of size {block} is partly visible; take smaller blocks, or "
            "say the rest in logits_mask",
        )
    if not array.size:
        return np.zeros(len(starts[0]), int), np.zeros(0, int), array.shape
    return (seen > 0).sum(axis=1), np.nonzero(seen)[1], array.shape


def _bsr_rows(
    mask: torch.Tensor, block: tuple[int, int] | None
) -> tuple[_Array, _Array, tuple[int, ...]]:
    """(blocks in each block row, their columns, shape) of a sparse_bsr tensor."""
    own = tuple(mask.values().shape[-2:])
    if block is not None and tuple(block) != own:
        raise ArgumentError(name="block", reason=f"is {block}, but the tensor's blocks are {own}")
    counts = np.diff(host_array(mask.crow_indices(), "masks"))
    return counts, host_array(mask.col_indices(), "masks"), tuple(mask.shape)


def _indptr(counts: Any) -> _Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
