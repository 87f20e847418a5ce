"""Sequences that a model lays one behind the other for kernels of FlashAttention's kind.

Vision towers do so where the name of the attention has "flash" in it: they hand no mask, and tell
where images begin by `cu_seq_lens_q`, or by positions that begin again at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# what tells of a pack, and is nothing to its sequences
_TELLING = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids",
)  # fmt: skip


class Pack(NamedTuple):
    """How many rows, and how many keys, each sequence has."""

    rows: list[int]
    keys: list[int]


def pack_of(kwargs: Mapping[str, Any], rows: int, keys: int, is_causal: bool) -> Pack | None:
    """The sequences of a layer's call, if there are several.

    Args:
        kwargs: what the model hands to its layers, beside q, k and v of one entry, and no mask.
        rows, keys: of all sequences.
        is_causal: the layer is; the masks of such models tell of positions that begin again.
    """
    ends, key_ends = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if ends is not None:
        found = Pack(_lengths(ends), _lengths(ends if key_ends is None else key_ends))
    else:
        positions = kwargs.get("position_ids")
        if is_causal or rows != keys or not isinstance(positions, torch.Tensor):
            return None
        begins = _begins(positions, rows)
        lengths = [end - begin for begin, end in zip(begins, [*begins[1:], rows], strict=True)]
        found = Pack(lengths, lengths)
    return found if len(found.rows) > 1 else None


def without_pack(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same for one sequence of it."""
    return {name: value for name, value in kwargs.items() if name not in _TELLING}


def _lengths(ends: torch.Tensor) -> list[int]:
    """Differences of cumulated lengths."""
    found: list[int] = ends.diff().tolist()
    return found


def _begins(positions: torch.Tensor, rows: int) -> list[int]:
    """Rows whose position is 0, in each axis that it has; the first row alone if it has another."""
    if positions.numel() != rows and positions.shape[:1] != (rows,):
        return [0]
    zeros: list[int] = (positions.reshape(rows, -1) == 0).all(1).nonzero().flatten().tolist()
    return zeros if zeros[:1] == [0] else [0]
