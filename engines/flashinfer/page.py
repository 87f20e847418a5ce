"""Tokens into pages, and how many there are."""

from __future__ import annotations

from typing import Any

import torch

from warploom.dsl.types.formats import Paged
from warploom.engines.flashinfer.refusals import checked_layout
from warploom.engines.flashinfer.tables import unpacked
from warploom.engines.flashinfer.words import in_words
from warploom.errors import BadLength, IndexOutOfRange, UnequalRequests, WrongDType, WrongShape
from warploom.runtime.inputs.args import KV, checked_kv, key_value
from warploom.runtime.tensors.tensors import as_torch
from warploom.runtime.wrappers.append import append

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

_WORDS = {
    **{"k": "append_key", "v": "append_value", "dtype": "the type of append_key"},
    **dict.fromkeys(("kv", "k cache", "v cache"), "paged_kv_cache"),
    "kv_dtype": "the type of paged_kv_cache",
}


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> torch.Tensor:
    """Keys of each request of a page table.

    Args:
        kv_indptr: int32 [requests + 1], in pages.
        kv_last_page_len: int32 [requests]; for a request without pages it is the result.
        page_size: tokens of a page.

    Returns:
        int32 [requests], on the device of kv_indptr.
    """
    begin, last = as_torch(kv_indptr, "kv_indptr"), as_torch(kv_last_page_len, "kv_last_page_len")
    return (begin.diff() - 1).clamp(min=0) * page_size + last


def get_batch_indices_positions(
    append_indptr: Any, seq_lens: Any, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """To which request each new token belongs, and at which position: new tokens are the last.

    Nothing is waited for, so that a CUDA graph can hold it.

    Args:
        append_indptr: int32 [requests + 1], where each request's new tokens begin.
        seq_lens: int32 [requests], keys of each request with its new tokens.
        nnz: how many results there are, append_indptr[-1] or more.
        batch_indices, positions: int32 [nnz], to be written in place of new tensors.

    Returns:
        Both, int32 [nnz]; -1 and 0 behind append_indptr[-1], which appends leave out.

    Raises:
        WrongShape: a tensor to be written is not [nnz].
    """
    begin, lens = as_torch(append_indptr, "append_indptr"), as_torch(seq_lens, "seq_lens")
    row = torch.arange(nnz, dtype=torch.int32, device=begin.device)
    is_new = row < begin[-1]
    last = max(len(lens) - 1, 0)
    request = torch.searchsorted(begin[1:].contiguous(), row, right=True).clamp_(max=last)
    if len(lens):
        position = lens.to(begin.device)[request] - begin[request + 1] + row
    else:
        position, is_new = torch.zeros_like(row), torch.zeros_like(row, dtype=torch.bool)
    made = torch.where(is_new, request, -1).int(), torch.where(is_new, position, 0).int()
    given = ("batch_indices", batch_indices, made[0]), ("positions", positions, made[1])
    return _written(*given[0]), _written(*given[1])


def _written(name: str, target: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    if target is None:
        return made
    if target.shape != made.shape:
        raise WrongShape(name=name, got=tuple(target.shape), expected=str(tuple(made.shape)))
    return target.copy_(made)


@in_words(**_WORDS)
def append_paged_kv_cache(
    append_key: Any, append_value: Any, batch_indices: Any, positions: Any, paged_kv_cache: Any,
    kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write keys and values of tokens into their places of a paged cache.

    Each token is written as the last one of a page, by `warploom.append`, so that positions may be
    any. On a GPU nothing is waited for, and a CUDA graph can hold it.

    Args:
        append_key: [tokens, num_kv_heads, head_dim]: float16, bfloat16, float32, or 8 bits.
        append_value: [tokens, num_kv_heads, head_dim_v], likewise.
        batch_indices: int32 [tokens], the request of each; those of -1 are left out.
        positions: int32 [tokens], where in its request each is.
        paged_kv_cache: (k, v) or one tensor [pages, 2, ...], of which k is [pages, page_size,
            num_kv_heads, head_dim], in layout HND with page_size and heads swapped.
        kv_indices: int32, pages.
        kv_indptr: int32 [requests + 1], where the pages of each request begin, with the new ones.
        kv_last_page_len: int32 [requests], not used: positions say it.
        kv_layout: "NHD" or "HND".

    Raises:
        ArgumentError: another layout.
        WrongShape: tensors that do not fit each other, or the cache in that layout.
        IndexOutOfRange: on the host, a request beyond the table.
        BadLength: on the host, a position beyond the pages of its request.
        What `warploom.append` raises; on the host that includes pages beyond the cache.
    """
    _check_not_swapped(kv_indptr, kv_last_page_len)
    cache, page_size, heads, lanes = _checked_cache(paged_kv_cache, kv_layout)
    given = ("append_key", append_key), ("append_value", append_value)
    k, v = (_widened(as_torch(x, name)) for name, x in given)
    there = k.device
    request, position, pages, begin = (
        _index(x, name).to(there)
        for name, x in (
            ("batch_indices", batch_indices), ("positions", positions),
            ("kv_indices", kv_indices), ("kv_indptr", kv_indptr),
        )
    )  # fmt: skip
    _check_shapes((k, v), request, position, heads, lanes, kv_layout)
    is_token = request >= 0
    if there.type == "cpu" and not bool(is_token.all()):
        k, v, request, position = (x[is_token] for x in (k, v, request, position))
        is_token = is_token[is_token]
    if not len(k) or not len(pages):
        return
    if there.type == "cpu" and int(request.max()) > len(begin) - 2:
        at, last = int(request.argmax()), len(begin) - 2
        raise IndexOutOfRange(
            name="batch_indices", index=at, value=int(request[at]), last=last, of="request"
        )
    entry = begin[request.clamp(min=0)] + position // page_size
    if there.type == "cpu":
        _check_places(position, entry, begin[1:][request])
    entry = entry.clamp(max=len(pages) - 1)
    page = torch.where(is_token, pages[entry], -1).int()  # -1: nothing is written
    each = torch.arange(len(k) + 1, dtype=torch.int32, device=there)
    filled = (position % page_size + 1).int()
    append(k, v, cache, each, each, page, filled, layout=checked_layout(kv_layout))


def _check_not_swapped(kv_indptr: Any, kv_last_page_len: Any) -> None:
    """Raises UnequalRequests for tables of two numbers of requests, as in plan's order."""
    requests, entries = len(kv_last_page_len), len(kv_indptr)
    if entries != requests + 1:
        others = f"kv_last_page_len has {requests}, and kv_indices comes before kv_indptr"
        raise UnequalRequests(
            name="kv_indptr", entries=entries, requests=entries - 1, others=others
        )


def _checked_cache(cache: Any, kv_layout: str) -> tuple[KV, int, int, tuple[int, int]]:
    """The cache, and its page size, heads, and lanes of keys and values."""
    token, head = (1, 2) if checked_layout(kv_layout) == "NHD" else (2, 1)
    kv = checked_kv(unpacked(cache, kv_layout), Paged(1), shared=True)
    for x in (halves := key_value(kv)):
        if x.dim() != 4:
            expected = "four axes, of pages, tokens and heads in the order of kv_layout, and lanes"
            raise WrongShape(name="paged_kv_cache", got=tuple(x.shape), expected=expected)
    shape = halves[0].shape
    return kv, shape[token], shape[head], (shape[3], halves[1].shape[3])


def _check_shapes(
    rows: tuple[torch.Tensor, torch.Tensor], request: torch.Tensor, position: torch.Tensor,
    heads: int, lanes: tuple[int, int], kv_layout: str,
) -> None:  # fmt: skip
    """Raises WrongShape for tensors that do not fit each other, or the cache in that layout."""
    tokens = request.shape[0]
    for name, x, dim in zip(("append_key", "append_value"), rows, lanes, strict=True):
        if tuple(x.shape) != (tokens, heads, dim):
            expected = f"[tokens={tokens}, heads={heads}, lanes={dim}], as batch_indices has them"
            place = f", and the cache in layout {kv_layout}"
            raise WrongShape(name=name, got=tuple(x.shape), expected=expected + place)
    if position.shape != request.shape:
        expected = f"{tuple(request.shape)}, as batch_indices"
        raise WrongShape(name="positions", got=tuple(position.shape), expected=expected)


def _check_places(position: torch.Tensor, entry: torch.Tensor, end: torch.Tensor) -> None:
    wrong = ((position < 0) | (entry >= end)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        expected = "a position in the pages of its request"
        raise BadLength(name="positions", index=at, value=int(position[at]), expected=expected)


def _index(x: Any, name: str) -> torch.Tensor:
    found = as_torch(x, name)
    if found.is_floating_point() or found.dtype == torch.bool:
        raise WrongDType(name=name, got=str(found.dtype), expected="torch.int32")
    return found


def _widened(x: torch.Tensor) -> torch.Tensor:
    """8-bit numbers as float16, which has them all, so that they are written as they were."""
    return x.half() if x.itemsize == 1 else x
