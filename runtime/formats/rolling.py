"""Rolling caches: a request's first tokens, and its last ones in a ring.

A plan lists the positions of the tokens that are kept, each a block of one token, oldest first. A
kernel takes a token's slot from its position, by two constants that it is compiled with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from warploom.dsl.types.formats import Rolling as Declared
from warploom.runtime.formats.base import Drawn, Format, Ints, OracleSegment, Stored
from warploom.runtime.formats.batch import Arguments, Arrays, Batch, HostBatch
from warploom.runtime.formats.lists import Int32s, as_indptr, as_int32, indptr, segments_of
from warploom.scheduler.model.bounds import Bounds


class Rolling(Format[Declared]):
    """See `warploom.Rolling`."""

    has_blocks = True
    block_name = ("batch", "requests")
    is_cache = True

    def instead(self, name: str) -> str:
        return "kv_indptr tells the lengths of whole sequences, and these what is in which slot"

    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        lengths = np.diff(indptr(given.kv_indptr, "kv_indptr", entries=len(qo)))
        kept = np.minimum(lengths, self.declared.slots)
        ends = as_int32(np.cumsum(kept, dtype=np.int64), "the sum of tokens that are kept")
        begin, sinks = ends - kept, np.minimum(kept, self.declared.sinks)
        # runs of positions: the sinks of each request, and its last tokens
        shift = np.stack((-begin, lengths - ends), axis=1)
        runs = np.stack((sinks, kept - sinks), axis=1)
        positions = np.arange(kept.sum(), dtype=np.int32) + np.repeat(shift, runs.ravel())
        seen = lengths if self.declared.column_positions else kept
        segments = segments_of(qo, seen)
        segments["kv_count"] = kept
        segments["kv_row"] = segments["batch"]  # see `kernel_strides`
        segments["index_begin"] = begin
        return HostBatch(int(qo[-1]), 0, Arrays(segments, positions, np.diff(qo), seen))

    def most_blocks(self, bounds: Bounds) -> tuple[str, int] | None:
        slots = self.declared.slots
        entries = bounds.max_requests * min(bounds.max_kv_len, slots)
        return f"max_requests * min(max_kv_len, {slots})", entries

    @property
    def ring(self) -> tuple[int, int] | None:
        declared = self.declared
        return (declared.window, declared.sinks) if declared.column_positions else None

    @property
    def obstacle_to_pretransform(self) -> str | None:
        return "keys of the format Rolling stay in their slots from plan to plan"

    @property
    def obstacle_to_appending(self) -> str | None:
        return "is no paged cache; write new tokens to slot_of(position) of each request"

    def kv_sizes(self, batch: Batch) -> tuple[dict[str, int], dict[str, int]]:
        return {"token": self.declared.slots}, {"block": batch.num_requests}

    def kernel_strides(self, block: int, token: int, head: int) -> tuple[int, int, int]:
        """Blocks are slots, and the request is what ragged storage calls the first token: so each
        has a stride of its own, whatever the tensor's are.
        """
        return token, block, head

    def keys_of(self, segment: Any, batch: HostBatch) -> tuple[Ints, tuple[Ints, Ints]]:
        place, begin = np.arange(int(segment["kv_count"])), int(segment["index_begin"])
        positions = batch.indices[begin : begin + len(place)].astype(np.int64)
        slots = self.declared.slot_of(positions)
        kv_pos = positions if self.declared.column_positions else place
        return kv_pos, (np.full_like(place, segment["batch"]), slots)

    def store(self, drawn: Drawn) -> Stored:
        """Tokens are written one after another, as a sequence grows."""
        pair, lengths = (drawn.k, drawn.v), drawn.lengths
        shape = len(lengths) + 1, self.declared.slots
        caches = [np.full((*shape, *x[0].shape[1:]), np.nan, np.float32) for x in pair]
        segments = []
        for request, (rows, length) in enumerate(zip(drawn.q_lens, lengths, strict=True)):
            owner = np.full(self.declared.slots, -1)
            for position in range(length):
                slot = self.declared.slot_of(position)
                owner[slot] = position
                for cache, tokens in zip(caches, pair, strict=True):
                    cache[request, slot] = tokens[request][position]
            kept = np.sort(owner[owner >= 0])
            is_true = self.declared.column_positions
            kv_pos, kv_len = (kept, length) if is_true else (np.arange(len(kept)), len(kept))
            segments.append([OracleSegment(slice(0, rows), kept, kv_pos, kv_len)])
        return Stored(caches[0], caches[1], {"kv_indptr": as_indptr(lengths)}, segments)
