"""Where a step's new tokens go and what its requests read, by tensors alone.

Nothing here is read by the host, so a device that plans waits for nothing, and CUDA graphs hold it:
transformers captures a step whole and replays it with other lengths and places in the same memory,
so the first layer of each kind makes its lists and its plan from that memory, inside of what is
captured. transformers fills such steps up: with rows and places that nobody wants, and with
requests that come last and have no keys, which get rows of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.engines.page_lists import Lists, lists_of_places, lists_on_device
from warploom.scheduler.model.bounds import Bounds

# Fused rows for each request that bounds allow, at most: a device plans where requests have few
# query tiles (`runtime.strategies.planner`), so it is told of more requests where prompts are long.
_FUSED_ROWS = 128


@dataclass(frozen=True)
class Step:
    """What the layers of one kind need to know of a step.

    Attributes:
        lists: what a plan takes.
        page, slot: int64 [tokens], where each new token is written.
        row: int64 [tokens], the row that it comes from; None if these are all rows in order.
    """

    lists: Lists
    page: torch.Tensor
    slot: torch.Tensor
    row: torch.Tensor | None = None

    @classmethod
    def of_table(cls, kv_indptr: torch.Tensor, table: torch.Tensor, page_size: int) -> Step:
        """A step in which every request has one new token, by the pages of each.

        A graph cannot leave out the tokens of requests that only fill the batch: in their place
        that of the first request is written once more.

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

    @classmethod
    def of_places(
        cls, indptr: Indptr, read: torch.Tensor, write: torch.Tensor, page_size: int
    ) -> Step:
        """A step of any rows, by the place of each token in the cache.

        Args:
            indptr: rows and keys of requests.
            read: int64, places of all keys; empty if none is older than the step.
            write: int64 [rows], places of new tokens, of rows that nobody wants as of others.
            page_size: tokens in a page; those of one follow each other.
        """
        places = read if len(read) else write
        lists = lists_of_places(*indptr.filled(len(write)), places, page_size)
        return cls(lists, write // page_size, write % page_size)

    def write(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        """Write new tokens [rows, heads, dim] to a cache [pages, page_size, heads, dim]."""
        cache[self.page, self.slot] = new if self.row is None else new[self.row]


@dataclass(frozen=True)
class Indptr:
    """Where each request's query rows and its keys begin: int32 [requests + 1] each."""

    qo: torch.Tensor
    kv: torch.Tensor

    def filled(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """With one request more, which has all rows up to `rows` that no other has, and no key."""
        qo = torch.nn.functional.pad(self.qo, (0, 1), value=rows)
        return qo, torch.cat((self.kv, self.kv[-1:]))


def bounds_by_table(table: torch.Tensor, page_size: int) -> Bounds:
    """The largest step of decodes that one wrapper plans for, given a table [requests, most pages].

    Bounds fix tile, grid and addresses. Without graphs the number of requests is any, and so
    wrappers are made for powers of two, as transformers makes graphs.
    """
    requests, most = _power_of_2(len(table)), table.shape[1]
    return Bounds(requests, requests, most * page_size, requests * most + 1)


def bounds_by_rows(
    requests: int, rows: int, keys: int, group_size: int, page_size: int | None
) -> Bounds:
    """The largest step of any rows that one wrapper plans for.

    Args:
        requests, rows: of a step; wrappers are made for powers of two.
        keys: that all requests of a step can have together.
        group_size: query heads of a key/value head.
        page_size: tokens in a page; None if keys lie one behind the other.
    """
    rows = _power_of_2(rows)
    most = max(_power_of_2(requests) + 1, rows * group_size // _FUSED_ROWS + 1)
    blocks = 0 if page_size is None else keys // page_size + most
    return Bounds(most, rows, keys, blocks)


def _power_of_2(count: int) -> int:
    """The next one, the number itself included."""
    return 1 << (count - 1).bit_length()


def plans_on(device: torch.device) -> bool:
    """Whether a device plans steps by itself."""
    return device.type == "cuda"
