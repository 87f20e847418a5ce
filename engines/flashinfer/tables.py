"""Page tables as FlashInfer takes them, made into those that `AttentionWrapper.plan` takes.

FlashInfer's may begin within a longer list of pages, and may count keys in place of the last pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from warploom.dsl.types.formats import Paged
from warploom.errors import ArgumentError, BadLength, WrongShape
from warploom.runtime.formats import make_batch
from warploom.runtime.tensors.tensors import as_torch

_Array = np.ndarray[Any, Any]


class Pages(NamedTuple):
    """Arguments of `plan` behind the rows; arrays of the host, but for the pages."""

    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any


def page_lists(indptr: Any, indices: Any, last_page_len: Any, device: torch.device | None) -> Pages:
    """The lists of a batch.

    Args:
        indptr: int32 [requests + 1], in pages; on the host it may begin above 0.
        indices: int32, pages; on any device.
        last_page_len: int32 [requests]; without meaning for a request without pages.
        device: where tables of int32 stay, if they lie there, since it plans; their `indptr` must
            begin with 0. None: the host plans, and gets copies.

    Raises:
        WrongShape: of other than one dimension.
    """
    tables = as_tensor(indptr, "kv_indptr"), as_tensor(last_page_len, "last_page_len")
    for name, x in zip(("kv_indptr", "last_page_len"), tables, strict=True):
        if x.dim() != 1:
            raise WrongShape(name=name, got=tuple(x.shape), expected="one dimension")
    if device is not None and all(_stays(x, device) for x in (*tables, indices)):
        return Pages(tables[0], indices, tables[1])
    begin, last_host = (host(x) for x in tables)
    if len(begin) and begin[0] > 0:
        indices, begin = indices[int(begin[0]) :], begin - begin[0]
    return Pages(begin, indices, last_host)


def _stays(x: Any, device: torch.device) -> bool:
    on_it = isinstance(x, torch.Tensor) and x.device == device
    return on_it and device.type == "cuda" and x.dtype == torch.int32


def as_tensor(x: Any, name: str) -> torch.Tensor:
    """A list becomes a tensor, too."""
    return torch.tensor(x) if isinstance(x, (list, tuple, range)) else as_torch(x, name)


def host(x: Any) -> _Array:
    """An array of the host, which waits for a device; int64 becomes int32."""
    found = as_tensor(x, "index array").cpu().numpy()
    return found.astype(np.int32) if found.dtype == np.int64 else found


def lists_of_lengths(indptr: Any, indices: Any, kv_lens: Any, page_size: int) -> Pages:
    """The lists of a batch whose keys are counted; pages behind them are left out.

    Args:
        indptr: int32 [requests + 1], in pages.
        indices: int32, pages.
        kv_lens: int32 [requests], keys of each.
        page_size: tokens of a page.

    Raises:
        BadLength: a request has more keys than its pages hold.
        ArgumentError: lengths of another number of requests.
    """
    begin, lens = host(indptr), host(kv_lens)
    if len(begin) != len(lens) + 1:
        reason = f"has {len(begin)} entries for {len(lens)} lengths; expected one more than those"
        raise ArgumentError(name="kv_indptr", reason=reason)
    used = -(-lens // page_size)
    wrong = np.flatnonzero((lens < 0) | (used > np.diff(begin)))
    if wrong.size:
        at = int(wrong[0])
        most = int(begin[at + 1] - begin[at]) * page_size
        expected = f"0 to {most}, which its pages hold"
        raise BadLength(name="kv_len_arr", index=at, value=int(lens[at]), expected=expected)
    new = np.concatenate(([0], np.cumsum(used))).astype(np.int32)
    if begin[0] or not np.array_equal(new, begin):
        taken = np.arange(new[-1]) + np.repeat(begin[:-1] - new[:-1], used)
        pages = as_tensor(indices, "kv_indices")
        indices = pages[torch.as_tensor(taken, device=pages.device)]
    last = np.where(lens > 0, (lens - 1) % page_size + 1, 0).astype(np.int32)
    return Pages(new, indices, last)


def check_lists(rows: Any, pages: Pages, page_size: int) -> None:
    """Check lists that are a part of a batch, whose own index errors would name.

    Pages on a device are not looked at. Raises what `AttentionWrapper.plan` does.
    """
    indices = as_tensor(pages.kv_indices, "kv_indices")
    if indices.device.type != "cpu":
        indices = torch.zeros(1, dtype=torch.int32).expand(indices.shape)
    make_batch(Paged(page_size), rows, pages.kv_indptr, indices, pages.last_page_len)


def lengths_of(pages: Pages, page_size: int) -> _Array:
    """Keys of each request of such lists; on a device they are waited for."""
    count, last = np.diff(host(pages.kv_indptr)), host(pages.last_page_len)
    return np.where(count > 0, (count - 1) * page_size + last, 0)


def check_seq_lens(seq_lens: Any, pages: Pages, page_size: int) -> None:
    """Compare lengths that FlashInfer is told beside page tables, where both lie on the host.

    Raises:
        BadLength: they differ.
    """
    told = None if seq_lens is None else as_tensor(seq_lens, "seq_lens")
    if told is None or told.device.type != "cpu" or isinstance(pages.kv_indptr, torch.Tensor):
        return
    lens, given = lengths_of(pages, page_size), host(told).ravel()
    wrong = np.flatnonzero(lens != given) if lens.shape == given.shape else np.array([0])
    if wrong.size:
        at = int(wrong[0])
        value = int(given[at]) if at < len(given) else None
        expected = f"{int(lens[at])}, as the page table says" if at < len(lens) else "no entry"
        raise BadLength(name="seq_lens", index=at, value=value, expected=expected)


def unpacked(cache: Any, kv_layout: str) -> Any:
    """A cache as `AttentionWrapper.run` takes it: pages of one token may lack their axis."""
    at = -3 if kv_layout == "NHD" else -2
    if isinstance(cache, (tuple, list)):
        flat = [isinstance(x, torch.Tensor) and x.dim() == 3 for x in cache]
        return tuple(x.unsqueeze(at) if one else x for x, one in zip(cache, flat, strict=True))
    if isinstance(cache, torch.Tensor) and cache.dim() == 4:
        return cache.unsqueeze(at)
    return cache
