"""Rows of pages, one for each request, as engines keep them; plans take one list of them all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Lists(NamedTuple):
    """Arguments of `AttentionWrapper.plan` for a paged cache, in their order."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any


def lists_on_device(
    qo_indptr: torch.Tensor, kv_lens: torch.Tensor, pages: torch.Tensor, page_size: int
) -> Lists:
    """What a device plans with, by kernels alone, so that a CUDA graph can hold it.

    No value is read by the host or copied from it, not even a number as a tensor.

    Args:
        qo_indptr: int32 [requests + 1].
        kv_lens: int32 [requests], keys of each; 0 for requests that only fill the batch.
        pages: int32 [requests, most pages]; entries behind those in use mean nothing.
        page_size: tokens in a page.

    Returns:
        Tensors on the device of `pages`. The list has requests * most pages + 1 entries, of which
        those behind `kv_indptr[-1]` mean nothing.
    """
    used = (kv_lens + (page_size - 1)) // page_size
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    column = torch.arange(pages.shape[1], dtype=torch.int32, device=pages.device)
    end = pages.numel()  # where those go that are not in use
    place = (indptr[:-1, None] + column).masked_fill(column >= used[:, None], end)
    listed = torch.empty(end + 1, dtype=torch.int32, device=pages.device)
    listed.scatter_(0, place.flatten().long(), pages.flatten())
    return Lists(qo_indptr, indptr, listed, (kv_lens - 1) % page_size + 1)


def lists_of_places(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, places: torch.Tensor, page_size: int
) -> Lists:
    """What a device plans with, likewise, where places of tokens are known and pages are not.

    Args:
        qo_indptr, kv_indptr: int32 [requests + 1], in tokens.
        places: int64, at least one: of each key of each request, the place in a cache, in which the
            tokens of a page follow each other. Those behind `kv_indptr[-1]` mean nothing.
        page_size: tokens in a page.

    Returns:
        Tensors on the device of `places`. The list has room for any lengths of so many tokens;
        entries behind its `kv_indptr[-1]` mean nothing.
    """
    lens = kv_indptr.diff()
    used = (lens + (page_size - 1)) // page_size
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    most = len(places) // page_size + len(lens)
    entry = torch.arange(most, dtype=torch.int32, device=lens.device)
    owner = torch.searchsorted(indptr[1:], entry, right=True).clamp_(max=len(lens) - 1)
    first = kv_indptr[owner] + page_size * (entry - indptr[owner])
    listed = places[first.clamp_(max=len(places) - 1)] // page_size
    return Lists(qo_indptr, indptr, listed.int(), (lens - 1) % page_size + 1)
