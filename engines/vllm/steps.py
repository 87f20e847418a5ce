"""One step of an engine: the lengths of its requests, and the pages that they list.

An engine keeps a row of pages for each request, [requests, most pages]; plans take one list. On a
GPU the rows lie on the device, and so does the list that is made of them: nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from warploom.engines.page_lists import Lists, lists_on_device

Int32s = npt.NDArray[np.int32]


@dataclass(eq=False)
class Step:
    """A batch that all layers of a KV-cache group attend with.

    Attributes:
        page_size: tokens in a page.
        rows: query rows, padding included.
        longest_q: query rows of the longest request.
        longest_kv: keys of the longest request, or more.
        qo_indptr: int32 [requests + 1], on the device.
        kv_lens: int32 [requests], on the device; 0 for requests that only fill the batch.
        pages: int32 [requests, most pages], on the device.
        host_qo: `qo_indptr` on the host.
        host_kv: `kv_lens` on the host; None if only the device knows them.
    """

    page_size: int
    rows: int
    longest_q: int
    longest_kv: int
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    pages: torch.Tensor
    host_qo: Int32s
    host_kv: Int32s | None

    @property
    def requests(self) -> int:
        return len(self.host_qo) - 1

    @cached_property
    def on_device(self) -> Lists:
        """For plans that a device makes."""
        return lists_on_device(self.qo_indptr, self.kv_lens, self._reached, self.page_size)

    @cached_property
    def on_host(self) -> Lists:
        """For plans that the host makes; page numbers stay where they are."""
        if self.pages.is_cpu:
            return self.with_host_pages
        return self._on_host(self.on_device.kv_indices)

    @cached_property
    def with_host_pages(self) -> Lists:
        """For plans that the host makes from page numbers, too."""
        used = self._used(self._lens)
        return self._on_host(self.host_pages[np.arange(self.host_pages.shape[1]) < used[:, None]])

    @cached_property
    def host_pages(self) -> Int32s:
        """`pages` on the host, as far as requests reach; waits for the device that has them."""
        return np.ascontiguousarray(self._reached.cpu().numpy())

    @cached_property
    def shares_pages(self) -> bool:
        """True if two requests begin with the same full page; reads `host_pages`."""
        if self.host_kv is None:
            return False
        first = self.host_pages[self.host_kv >= self.page_size, 0]
        return len(np.unique(first)) < len(first)

    @cached_property
    def _lens(self) -> Int32s:
        return self.kv_lens.cpu().numpy() if self.host_kv is None else self.host_kv

    @property
    def _reached(self) -> torch.Tensor:
        return self.pages[:, : min(self.pages.shape[1], -(-self.longest_kv // self.page_size))]

    def _used(self, lens: Int32s) -> Int32s:
        return (lens + (self.page_size - 1)) // self.page_size

    def _on_host(self, listed: Any) -> Lists:
        lens = self._lens
        used = self._used(lens)
        indptr = np.zeros(len(used) + 1, np.int32)
        np.cumsum(used, out=indptr[1:])
        return Lists(self.host_qo, indptr, listed, (lens - 1) % self.page_size + 1)
