"""Steps that only decode, planned where their lengths lie: nothing waits, CUDA graphs hold them.

transformers captures such a step whole, once for each number of requests that is a power of two,
and replays it with other lengths and tables in the same memory. So the first layer of each kind
makes its lists and its plan from that memory, inside of what is captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.engines.page_lists import Lists, lists_on_device
from warploom.scheduler.bounds import Bounds


@dataclass(frozen=True)
class Decodes:
    """A step in which every request has one new token, on its device.

    Attributes:
        lists: what a plan takes.
        page, slot: int64 [requests], where a token is written.
        row: int64 [requests], the row that it comes from.
    """

    lists: Lists
    page: torch.Tensor
    slot: torch.Tensor
    row: torch.Tensor

    @classmethod
    def of(cls, kv_indptr: torch.Tensor, table: torch.Tensor, page_size: int) -> Decodes:
        """Read lengths and tables on the device.

        Requests that only fill the batch come last and have no keys: each gets a row of zeros. A
        graph writes a token for each of them all the same, since it cannot leave one out: once
        more that of the first request.

        Args:
            kv_indptr: int32 [requests + 1], in tokens.
            table: int32 [requests, most pages].
            page_size: tokens in a page.
        """
        lens = kv_indptr.diff()
        row = torch.arange(len(lens), device=lens.device) * (lens > 0)
        newest = (lens[row] - 1).long()
        page = table[row, newest // page_size].long()
        rows = torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)
        lists = lists_on_device(rows, lens, table, page_size)
        return cls(lists, page, newest % page_size, row)

    def write(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        """Write new tokens [requests, heads, dim] to a cache [pages, page_size, heads, dim]."""
        cache[self.page, self.slot] = new[self.row]


def bounds_of(table: torch.Tensor, page_size: int) -> Bounds:
    """The largest step that one wrapper plans for, given a table [requests, most pages].

    Bounds fix tile, grid and addresses. Without graphs the number of requests is any, and so
    wrappers are made for powers of two, as transformers makes graphs.
    """
    requests, most = 1 << (len(table) - 1).bit_length(), table.shape[1]
    return Bounds(requests, requests, most * page_size, requests * most + 1)


def plans_on(device: torch.device) -> bool:
    """Whether a device plans such steps by itself."""
    return device.type == "cuda"
