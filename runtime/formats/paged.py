"""Paged caches: [page, token in page, head, dim] and a list of pages for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from warploom.dsl.types.formats import Paged as Declared
from warploom.errors import IndexOutOfRange
from warploom.runtime.formats.base import Drawn, Format, Ints, Stored, whole_requests
from warploom.runtime.formats.batch import Arguments, Arrays, Batch, HostBatch, Measured
from warploom.runtime.formats.lists import (
    Int32s,
    as_indptr,
    as_int32,
    block_list,
    indptr,
    one_per_request,
    refuse_lengths,
    segments_of,
)
from warploom.scheduler.model.bounds import Bounds

if TYPE_CHECKING:
    import torch

AnyPaged = TypeVar("AnyPaged", bound=Declared)


class Pages(Format[AnyPaged]):
    """What all paged caches have in common."""

    takes = ("kv_indices", "last_page_len")
    has_blocks = True
    is_cache = True
    joins_kv = True

    @property
    def obstacle_to_appending(self) -> str | None:
        return None

    def instead(self, name: str) -> str:
        return f"give last_page_len, which is {self._last_page}"

    @property
    def _last_page(self) -> str:
        """Tokens in a request's last page, as a formula."""
        return f"(kv_len - 1) % {self.declared.page_size} + 1; 0 is for requests without pages"

    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        kv = indptr(given.kv_indptr, "kv_indptr", entries=len(qo))
        indices = _page_list(given.kv_indices, int(kv[-1]), self.name)
        lengths = self._lengths(np.diff(kv), given.last_page_len)
        segments = segments_of(qo, lengths)
        segments["index_begin"] = kv[:-1]
        last = int(indices.max(initial=-1))
        return HostBatch(int(qo[-1]), last + 1, Arrays(segments, indices, np.diff(qo), lengths))

    def _lengths(self, pages: Int32s, last_page_len: Any) -> Int32s:
        """Tokens of each request."""
        size, last = (
            self.declared.page_size,
            one_per_request(last_page_len, "last_page_len", len(pages)),
        )
        wrong = (pages > 0) & ((last < 1) | (last > size))
        refuse_lengths(wrong, last, "last_page_len", f"1 to {size}, which is {self._last_page}")
        full = (pages.astype(np.int64) - 1) * size
        return as_int32(np.where(pages > 0, full + last, 0), "kv_len")

    def most_blocks(self, bounds: Bounds) -> tuple[str, int] | None:
        size = self.declared.page_size
        each = -(-bounds.max_kv_len // size)
        return f"max_requests * ceil(max_kv_len / {size})", bounds.max_requests * each

    def kv_sizes(self, batch: Batch) -> tuple[dict[str, int], dict[str, int]]:
        return {"token": self.declared.page_size}, {"block": 0}

    def check_extent(self, k: torch.Tensor, batch: Batch) -> None:
        if len(k) < batch.kv_extent:
            at, value, last = _place_of_largest(batch), batch.kv_extent - 1, len(k) - 1
            raise IndexOutOfRange(name="kv_indices", index=at, value=value, last=last, of="page")

    def keys_of(self, segment: Any, batch: HostBatch) -> tuple[Ints, tuple[Ints, Ints]]:
        place, size = np.arange(int(segment["kv_count"])), self.declared.page_size
        page = batch.indices[int(segment["index_begin"]) + place // size].astype(np.int64)
        return place, (page, place % size)

    def store(self, drawn: Drawn) -> Stored:
        size, lengths = self.declared.page_size, drawn.lengths
        counts = [-(-n // size) for n in lengths]
        total = sum(counts)
        pages = drawn.rng.permutation(total + 2)[:total].astype(np.int32)
        own = np.split(pages, np.cumsum(counts)[:-1])
        self._share(drawn, own)
        caches = []
        for requests in (drawn.k, drawn.v):
            cache = np.full((total + 2, size, *requests[0].shape[1:]), np.nan, np.float32)
            for tokens, table in zip(requests, own, strict=True):
                place = np.arange(len(tokens))
                cache[table[place // size], place % size] = tokens
            caches.append(cache)
        last = [(n - 1) % size + 1 if n else 0 for n in lengths]
        plan = {
            "kv_indptr": as_indptr(counts),
            "kv_indices": pages,
            "last_page_len": np.array(last, np.int32),
        }
        return Stored(caches[0], caches[1], plan, whole_requests(drawn))

    def _share(self, drawn: Drawn, tables: Sequence[Int32s]) -> None:
        """Let requests of a random batch have pages in common, where the format is made for it."""


class Paged(Pages[Declared]):
    """See `warploom.Paged`."""

    plans_on_device = True

    @property
    def native_storage(self) -> int | None:
        return 2


def _place_of_largest(batch: Batch) -> int | str:
    """Of the largest page number in the list, as far as it can be told."""
    if isinstance(batch, HostBatch):
        return int(batch.indices.argmax())
    assert isinstance(batch, Measured)  # pages that lie on a device are not counted
    pages = block_list(batch.lengths.kept[3], batch.sizes.num_blocks, "")
    at = int(pages.argmax())
    return at if pages[at] == batch.kv_extent - 1 else "..."  # the caller has changed them


def _page_list(kv_indices: Any, needed: int, name: str) -> Int32s:
    indices = block_list(kv_indices, needed, f"a {name} cache counts pages")
    negative = np.flatnonzero(indices < 0)
    if negative.size:
        at = int(negative[0])
        raise IndexOutOfRange(
            name="kv_indices", index=at, value=int(indices[at]), last="the last page"
        )
    return indices
