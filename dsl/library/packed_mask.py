"""Any mask at all, one bit for each pair of query and key (FlashInfer's packed custom mask)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from warploom.dsl.values.arrays import to_numpy
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError


class _Packed(Variant):
    """Bits of all requests, row by row and little-endian, and where each request's bytes begin."""

    packed_mask = Tensor("uint8", (None,))
    mask_indptr = Tensor("int32", (None,))

    def __init__(self, packed_mask: Any = None, mask_indptr: Any = None) -> None:
        if packed_mask is not None:
            self.packed_mask = packed_mask
        if mask_indptr is not None:
            self.mask_indptr = mask_indptr

    def _bit(self, at: Position, index: Value) -> Value:
        byte = self.packed_mask[self.mask_indptr[at.batch] + (index >> 3)]
        return ((byte >> (index & 7)) & 1) == 1

    def _columns(self, q_lens: Any, kv_lens: Any) -> Any:
        """Bits of each row of each request."""
        return kv_lens

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        if not known.keys() >= {"packed_mask", "mask_indptr"}:
            return  # on a device, or not given yet
        begins, requests = known["mask_indptr"].astype(np.int64), len(q_lens)
        if len(begins) <= requests:
            reason = f"has {len(begins)} entries; expected requests + 1 = {requests + 1}"
            raise ArgumentError(name="mask_indptr", reason=reason)
        columns = np.asarray(self._columns(q_lens, kv_lens), np.int64)
        ends = np.minimum(begins[1 : requests + 1], len(known["packed_mask"]))
        held = np.maximum(ends - begins[:requests], 0)
        needed = -(-(q_lens * columns) // 8)
        wrong = np.flatnonzero((begins[:requests] < 0) | (held != needed))
        if wrong.size:
            at = int(wrong[0])
            reason = (
                f"request {at} has {8 * held[at]} bits; the batch needs {q_lens[at]} rows of "
                f"{columns[at]}, {8 * needed[at]} in whole bytes. Pack a mask of that size"
            )
            raise ArgumentError(name="packed_mask", reason=reason)


class PackedMask(_Packed):
    """Visible where bit q_idx * kv_len + kv_pos of the request is set; make the bits with
    `pack_masks`.

    A request may have up to 2^31 pairs, and all requests 2^31 bytes. `plan`, `attention`, and on
    the CPU `run`, refuse host masks that have not as many bits as the batch has pairs, rounded up
    to bytes. Masks on a device are not looked at.

    Args:
        packed_mask: [bytes] uint8; None leaves it to be given at run time.
        mask_indptr: [batch + 1] int32, first byte of each request.
    """

    def logits_mask(self, at: Position) -> Value:
        return self._bit(at, at.q_idx * at.kv_len + at.kv_pos)


class TreeMask(_Packed):
    """Speculative decoding: the queries are the last q_len tokens, a tree; what is before is
    visible.

    Bit q_idx * q_len + j says that a query sees the j-th token of the tree, so bits need no memory
    for the context. What is refused where is as of `PackedMask`.

    Args:
        packed_mask: [bytes] uint8, from `pack_masks` of [q_len, q_len] masks; None: given at run
            time.
        mask_indptr: [batch + 1] int32, first byte of each request.
    """

    def _columns(self, q_lens: Any, kv_lens: Any) -> Any:
        return q_lens

    def logits_mask(self, at: Position) -> Value:
        node = at.kv_pos - (at.kv_len - at.q_len)
        return (node < 0) | self._bit(at, at.q_idx * at.q_len + node)


def pack_masks(masks: Sequence[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pack one mask [rows, columns] for each request: True, or 1, where the query sees the key.

    Args:
        masks: as many masks as requests, in their order, of bools or of the integers 0 and 1; sizes
            may differ.

    Returns:
        Bits as uint8 [bytes], each request padded to whole bytes, one byte at least, and int32
        [requests + 1] offsets.

    Raises:
        ArgumentError: a mask that has not 2 dimensions, as the parts of a single mask, or that
            holds other numbers, as a mask that is added to logits; or no list of masks.
    """
    if not isinstance(masks, Iterable):
        reason = f"is {masks!r}; expected a list of masks, one for each request"
        raise ArgumentError(name="masks", reason=reason)
    arrays = [mask_bits(f"masks[{i}]", mask) for i, mask in enumerate(masks)]
    packed = [np.packbits(array.ravel(), bitorder="little") for array in arrays]
    offsets = np.cumsum([0, *(len(part) for part in packed)]).astype(np.int32)
    spare = np.zeros(int(offsets[-1] == 0), np.uint8)  # kernels need something to read
    return np.concatenate([spare, *packed]), offsets


def mask_bits(name: str, mask: Any) -> np.ndarray[Any, Any]:
    """A mask as bools [rows, columns]; `name` is what messages call it.

    Raises:
        ArgumentError: not two dimensions, or other values than True, False, 0 and 1.
    """
    array = to_numpy(mask)
    if array.ndim != 2:
        reason = (
            f"{name} has shape {array.shape}; each mask must have 2 dimensions, "
            "[rows, columns]. Give a list of masks, one for each request"
        )
        raise ArgumentError(name="masks", reason=reason)
    whole = array.size == 0 or array.dtype.kind in "bi"
    if not whole or not np.isin(array, (0, 1)).all():
        held = "other integers than 0 and 1" if whole else str(getattr(mask, "dtype", array.dtype))
        reason = (
            f"{name} holds {held}; masks are True where the query sees the key. For a "
            "mask that is added to logits give `mask > -inf` or `mask == 0`"
        )
        raise ArgumentError(name="masks", reason=reason)
    return array.astype(bool)
