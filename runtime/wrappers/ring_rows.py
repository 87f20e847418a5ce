"""Steps whose later tokens have overwritten slots of a rolling cache that the first row sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from warploom.dsl.masks.intervals import FULL, SKIP, TileAnalysis
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import ArgumentError
from warploom.runtime.formats.batch import HostBatch
from warploom.runtime.planning.visibility import Heads, MaskVisibility


def refuse_overwritten(
    ring: tuple[int, int],
    traced: TracedVariant,
    batch: HostBatch,
    scalars: Mapping[str, Any],
    known: Mapping[str, Any],
    heads: Heads,
) -> None:
    """Refuse requests of several rows if the first row loses keys that its mask shows.

    If the mask hides all overwritten keys from the last row, then the mask defines the window, and
    it must do so for the first row, too. If the mask shows the last row overwritten keys, then the
    ring defines the window, and the request is accepted. So are requests whose mask is undecided.

    Args:
        ring: window and sinks of the cache.
        traced: the variant.
        batch: batch with the lengths of whole sequences.
        scalars, known: values of scalar fields, and of tensors that the mask reads, as far as the
            host has them.
        heads: head counts.

    Raises:
        ArgumentError: the message says how many slots are enough.
    """
    window, sinks = ring
    rows, lengths = (x.astype(np.int64) for x in (batch.q_lens, batch.kv_lens))
    mask = traced.hooks.get("logits_mask")
    found = np.flatnonzero((rows > 1) & (lengths > window + sinks))
    if mask is None or not len(found):
        return
    analysis = TileAnalysis(traced, scalars, known)
    visibility = MaskVisibility(mask, analysis, batch.arrays, heads)
    few, lost = heads.group_size, lengths[found] - window  # fused rows of a row; end of lost keys
    first, last = (
        visibility.classify(found, row, row + few, np.full_like(found, sinks), lost)
        for row in (np.zeros_like(found), (rows[found] - 1) * few)
    )
    for at in np.flatnonzero((last == SKIP) & (first != SKIP)):
        # classify overwritten keys one by one: a box may be PARTIAL though its keys are hidden
        count = int(rows[found[at]])
        keys = np.arange(max(sinks, lost[at] - count + 1), lost[at])
        request, begin = np.full_like(keys, found[at]), np.zeros_like(keys)
        if (visibility.classify(request, begin, begin + few, keys, keys + 1) == FULL).any():
            reason = (
                f"gives request {found[at]} {count} rows, and tokens of the later ones have taken "
                f"the slots of keys that its first row sees. Rolling({window + count - 1}, {sinks})"
                " has slots enough for as many rows; or plan fewer at once"
            )
            raise ArgumentError(name="qo_indptr", reason=reason)
