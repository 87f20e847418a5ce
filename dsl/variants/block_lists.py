"""The lists of a torch `BlockMask`: which blocks of queries and keys are hidden or fully visible.

In torch the lists and `mask_mod` together define visibility: a block in no list is hidden, in a
block of `kv_indices` the mask_mod decides, and a block of `full_kv_indices` is fully visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.dsl.masks.intervals import FIXED, FULL, SKIP, TileAnalysis
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.arrays import to_numpy
from warploom.dsl.values.stand_ins import has_memory
from warploom.dsl.values.symbols import Value
from warploom.errors import ArgumentError

ABSENT, PARTIAL, WHOLE = 0, 1, 2  # states of blocks: in no list, in kv_indices, in full_kv_indices
_MOST_BLOCKS = 2**24  # blocks that are compared with the mask; 1024 x 1024 of 16 heads
_NO_BLOCKS = 2**30  # queries and keys of a block in torch's BlockMask that stands for no mask
_ALONE = "or give its mask_mod alone (mask_mod=block_mask.mask_mod), which holds at any length"


class _States(np.ndarray[Any, Any]):
    """The table of states; when captured, it becomes a field with these axes."""

    field_axes: tuple[str | None, ...]


class BlockLists:
    """The lists as one table, which the constructor reads.

    Attributes:
        states: [batch or 1, q_heads or 1, query blocks, key blocks] uint8, the state of each block.
        sizes: queries and keys of a block.
        lengths: queries and keys that the lists cover.

    Args:
        block_mask: a torch `BlockMask`.

    Raises:
        ArgumentError: a list names a block that does not exist, or its count exceeds its length.
    """

    def __init__(self, block_mask: Any) -> None:
        rows, keys = map(int, block_mask.BLOCK_SIZE)
        q_len, kv_len = map(int, block_mask.shape[-2:])
        self.sizes, self.lengths = (rows, keys), (q_len, kv_len)
        columns = -(-self.lengths[1] // self.sizes[1])
        partial = _table("kv", block_mask.kv_num_blocks, block_mask.kv_indices, columns)
        self.states = np.where(partial, PARTIAL, ABSENT).astype(np.uint8)
        if block_mask.full_kv_num_blocks is not None:
            given = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
            self.states = np.where(_table("full_kv", *given, columns), WHOLE, self.states)
            self.states = self.states.astype(np.uint8)

    def narrow(self, mask_mod: Callable[..., Value]) -> Callable[..., Value]:
        """`mask_mod` combined with the lists, as a function with the same arguments."""
        has_absent = bool((self.states == ABSENT).any())
        has_whole = bool((self.states == WHOLE).any())
        many_batches, many_heads = (size > 1 for size in self.states.shape[:2])
        block_mask = self.states.view(_States)  # errors use the closure variable's name
        block_mask.field_axes = (
            *("batch" if many_batches else None, "q_head" if many_heads else None),
            *(None, None),
        )
        rows, keys = self.sizes

        @functools.wraps(mask_mod)
        def listed(b: Value, h: Value, q_idx: Value, kv_idx: Value) -> Value:
            batch, head = b if many_batches else 0, h if many_heads else 0
            state = block_mask[batch, head, q_idx // rows, kv_idx // keys]
            shown = mask_mod(b, h, q_idx, kv_idx)
            if has_whole:
                shown = (state == WHOLE) | shown
            return (state != ABSENT) & shown if has_absent else shown

        return listed if has_absent or has_whole else mask_mod

    def add_nothing(self, traced: TracedVariant) -> bool:
        """Whether the lists provably do not change the mask of a variant.

        If True, the variant does not need the lists, at any lengths. False if tile analysis cannot
        decide, or if the mask captures tensors, whose contents may change.

        Args:
            traced: a variant whose `logits_mask` is the mask_mod.
        """
        mask = traced.hooks.get("logits_mask")
        batches, heads = self.states.shape[:2]
        if traced.scalars or traced.tensors or traced.functions or self.states.size > _MOST_BLOCKS:
            return False
        read = set() if mask is None else {node.attr for node in walk(mask) if node.op == "var"}
        if (batches == 1 and "batch" in read) or (heads == 1 and "q_head" in read):
            return False
        analysis = TileAnalysis(traced, {})
        length = max(self.lengths)  # of both sequences: positions of queries are then their rows
        batch, head, row, column = np.indices(self.states.shape, np.int64).reshape(4, -1)
        ones = np.ones_like(batch)
        fixed = {**dict.fromkeys(FIXED, ones), "batch": batch, "num_q_heads": ones * heads}
        fixed |= {"q_len": ones * length, "kv_len": ones * length, "kv_head": 0 * ones}
        boxes = {
            "q_pos": _bounds(row, self.sizes[0], self.lengths[0]),
            "kv_pos": _bounds(column, self.sizes[1], self.lengths[1]),
            "q_head": (head, head + 1),
        }
        found = analysis.classify(**fixed, **boxes).reshape(self.states.shape)
        agree = (
            (self.states == PARTIAL)
            | ((self.states == ABSENT) & (found == SKIP))
            | ((self.states == WHOLE) & (found == FULL))
        )
        return bool(agree.all())

    def check_lengths(self, q_lens: Any, kv_lens: Any) -> None:
        """Refuse a batch whose lengths are not those of the mask, as flex_attention does.

        flex_attention pads requests to the longest, so the longest request counts. A BlockMask that
        stands for no mask, by its huge blocks, fits all lengths, in torch and here.

        Args:
            q_lens, kv_lens: int [requests].

        Raises:
            ArgumentError: the number of requests, or the most rows or keys of a request, differ.
        """
        self._check_requests(len(q_lens))
        got = _longest(q_lens), _longest(kv_lens)
        if not len(q_lens) or got == self.lengths or self.sizes == (_NO_BLOCKS, _NO_BLOCKS):
            return
        is_longer = got[0] > self.lengths[0] or got[1] > self.lengths[1]
        adjust = (
            "crop it with block_mask._adjust(q_len, kv_len), say block_mask.seq_lengths = (q_len, "
            "kv_len) of one that was sliced, "
        )
        adjust = "" if is_longer else adjust
        reason = (
            f"{self._shown}; the batch has {got[0]} rows and {got[1]} keys. Make a BlockMask of "
            f"that size, {adjust}{_ALONE}"
        )
        raise ArgumentError(name="block_mask", reason=reason)

    def check_positions(self, kv_lens: Any) -> None:
        """Refuse a batch with positions beyond the lists, for lists that are indexed by position.

        Raises:
            ArgumentError: the number of requests differs, or there are more keys than in the lists.
        """
        self._check_requests(len(kv_lens))
        longest = _longest(kv_lens)
        if longest > min(self.lengths):
            reason = f"{self._shown}; the batch has {longest} keys and positions of rows. "
            reason += f"Make a BlockMask of that size, {_ALONE}"
            raise ArgumentError(name="block_mask", reason=reason)

    @property
    def _shown(self) -> str:
        return f"has lists of {self.lengths[0]} queries and {self.lengths[1]} keys"

    def _check_requests(self, requests: int) -> None:
        batches = self.states.shape[0]
        if batches not in (1, requests):
            reason = (
                f"has lists of {batches} requests; the batch has {requests}. Make the BlockMask "
                f"with B={requests}, or B=None where all are alike"
            )
            raise ArgumentError(name="block_mask", reason=reason)


def _longest(lens: Any) -> int:
    return int(np.max(lens, initial=0))


def _bounds(block: Any, size: int, length: int) -> tuple[Any, Any]:
    return block * size, np.minimum((block + 1) * size, length)


def _table(name: str, counts: Any, indices: Any, columns: int) -> Any:
    """[batch, heads, query blocks, columns] bool: the blocks that a list names."""
    if not all(map(has_memory, (counts, indices))):
        kind = type(indices).__name__
        reason = f"has {name}_indices without values ({kind}); make it of real tensors"
        raise ArgumentError(name="block_mask", reason=reason)
    counts, indices = to_numpy(counts), to_numpy(indices)
    named = np.arange(indices.shape[-1]) < counts[..., None]
    wrong = named & ((indices < 0) | (indices >= columns))
    if (counts > indices.shape[-1]).any() or wrong.any():
        reason = f"{name}_indices name blocks that are not there; it has {columns} blocks of keys"
        raise ArgumentError(name="block_mask", reason=reason)
    found = np.zeros((*counts.shape, columns), bool)
    np.logical_or.at(found, (*np.indices(indices.shape)[:-1], indices * named), named)
    return found
