"""Dense storage: [batch, token, head, dim], a sequence for each request or one for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warploom.dsl.types.formats import Dense as Declared
from warploom.runtime.formats.base import Affine, Drawn, Floats, Stored, whole_requests
from warploom.runtime.formats.batch import Arguments, Arrays, Batch, HostBatch
from warploom.runtime.formats.lists import (
    NO_INDICES,
    Int32s,
    as_indptr,
    indptr,
    refuse_lengths,
    segments_of,
)


class Dense(Affine[Declared]):
    """See `warploom.Dense`."""

    batched = True
    has_blocks = True
    block_name = ("batch", "requests")

    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        lengths = np.diff(indptr(given.kv_indptr, "kv_indptr", entries=len(qo)))
        q_lens = np.diff(qo)
        rows = int(q_lens.max(initial=0))
        expected = f"{rows}, since dense queries are one [batch, row, head, dim] tensor"
        refuse_lengths(q_lens != rows, q_lens, "q_len", expected)
        segments = segments_of(qo, lengths)
        segments["q_row"] = 0
        segments["kv_block"] = 0 if self.declared.shared else segments["batch"]
        longest = int(lengths.max(initial=0))
        return HostBatch(rows, longest, Arrays(segments, NO_INDICES, q_lens, lengths))

    @property
    def native_storage(self) -> int | None:
        return None if self.declared.shared else 0

    @property
    def obstacle_to_pretransform(self) -> str | None:
        if self.declared.shared:
            return "requests share their keys, which a transform may read differently for each"
        return None

    def kv_sizes(self, batch: Batch) -> tuple[dict[str, int], dict[str, int]]:
        exact = {"block": 1} if self.declared.shared else {}
        return exact, {"token": batch.kv_extent, "block": batch.num_requests}

    def store(self, drawn: Drawn) -> Stored:
        plan = {"kv_indptr": as_indptr(drawn.lengths)}
        return Stored(_stack(drawn.k), _stack(drawn.v), plan, whole_requests(drawn))


def _stack(requests: Sequence[Floats]) -> Floats:
    """[batch, longest, heads, dim], NaN behind the end of each request."""
    longest = max(len(x) for x in requests)
    whole = np.full((len(requests), longest, *requests[0].shape[1:]), np.nan, np.float32)
    for row, tokens in zip(whole, requests, strict=True):
        row[: len(tokens)] = tokens
    return whole
