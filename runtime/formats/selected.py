"""Paged caches whose page tables are a tensor on the device, one for each key/value head.

Declared as `wl.Paged`, since kernels are the same; `PageSelectionWrapper` plans them so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.formats import Paged as Declared
from warploom.errors import ArgumentError, WrongStride
from warploom.runtime.formats.batch import Arguments, Arrays, HostBatch
from warploom.runtime.formats.lists import NO_INDICES, Int32s, indptr, refuse_lengths, segments_of
from warploom.runtime.formats.paged import Pages
from warploom.scheduler.model.bounds import INT32_MAX, Bounds


@dataclass(eq=False)
class SelectedBatch(HostBatch):
    """A batch whose block list is a tensor of the caller's.

    Attributes:
        selection: int32 [requests or more, kv_head, budget].
        num_pages: int32 [requests], entries that are read of each request's lists.
    """

    selection: torch.Tensor
    num_pages: Int32s


class Selected(Pages[Declared]):
    """Pages that a tensor names. Plans know how many they are, and nothing of their names."""

    @classmethod
    def of(cls, kv_format: KVFormat) -> Selected:
        """Raises ArgumentError for what is not paged."""
        if type(kv_format) is not Declared:
            raise ArgumentError(name="kv_format", reason=f"selections need Paged, not {kv_format}")
        return cls(kv_format)

    def lower(self, qo: Int32s, given: Arguments) -> SelectedBatch:
        """See `Format.lower`; `kv_indices` is the tensor, of which the wrapper has checked type,
        device, requests and heads.

        Raises:
            BadLength: a request reads more pages than its lists have.
            WrongStride: entries lie further apart than kernels count.
        """
        selection = given.kv_indices
        pages = np.diff(indptr(given.kv_indptr, "kv_indptr", entries=len(qo)))
        _, heads, budget = selection.shape
        most = f"at most {budget}, the last size of kv_indices"
        refuse_lengths(pages > budget, pages, "pages of kv_indptr", most)
        lengths = self._lengths(pages, given.last_page_len)
        of_request, of_head = (selection.stride(axis) for axis in (0, 1))
        last_entry = max(len(pages) - 1, 0) * of_request + (heads - 1) * of_head + budget
        if max(last_entry, of_head if heads > 1 else 0) > INT32_MAX:
            expected = "the last entry must lie within 2**31 - 1 entries of the first"
            raise WrongStride(name="kv_indices", got=selection.stride(), expected=expected)
        segments = segments_of(qo, lengths)
        segments["index_begin"] = np.arange(len(pages)) * of_request
        segments["index_head_stride"] = of_head if heads > 1 else 0
        arrays = Arrays(segments, NO_INDICES, np.diff(qo), lengths)
        return SelectedBatch(int(qo[-1]), 0, arrays, selection, pages)

    def most_blocks(self, bounds: Bounds) -> tuple[str, int] | None:
        return None
