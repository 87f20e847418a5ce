"""Pages of beams over a shared prefix: beams are reordered in the page table, keys stay in place.

All beams list the full pages of the prefix, then pages that hold their own tokens. A beam that two
others continue lends both its pages; only what would be written by both is copied before, and that
is the last page, where it is not full. With pages of one token there is no such page.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from warploom.errors import ArgumentError, WrongShape
from warploom.recommendation_errors import BadParent, TooFewPages
from warploom.runtime.declaring.declare import checked_count
from warploom.runtime.tensors.tensors import host_array

Ints = npt.NDArray[np.int64]

_MOST = int(np.iinfo(np.int32).max)  # plans and kernels read int32


class Copies(NamedTuple):
    """Pages whose contents have to be copied before the next token is written.

    Attributes:
        source, target: int64 [copies]; no page is a source and a target.
        tokens: how many of each page are filled, 0 where nothing is copied.
        page_size: tokens of a page.
    """

    source: Ints
    target: Ints
    tokens: int
    page_size: int

    def apply(self, *caches: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
        """Copy within these tensors, whose first dimension counts pages.

        Whole pages are copied: where a page has its tokens differs between layouts.

        Args:
            caches: [pages, ..], one of the other dimensions the page size; or pairs (k, v) of
                such, as `append` and `run` take them.

        Raises:
            ArgumentError: no tensors.
            WrongShape: pages of another size, or fewer of them than are listed. Nothing is copied.
        """
        if len(self.source):
            pairs = [one if isinstance(one, (tuple, list)) else [one] for one in caches]
            tensors = [tensor for pair in pairs for tensor in pair]
            for number, cache in enumerate(tensors):
                self._check(f"caches[{number}]", cache)
            for cache in tensors:
                if cache.element_size() == 1:
                    cache = cache.view(torch.uint8)  # torch selects no 8-bit floats on a CPU
                source, target = (
                    torch.from_numpy(pages).to(cache.device) for pages in (self.source, self.target)
                )
                cache.index_copy_(0, target, cache.index_select(0, source))

    def _check(self, name: str, cache: object) -> None:
        if not isinstance(cache, torch.Tensor):
            reason = f"is of type {type(cache).__name__}; expected a tensor, or a pair (k, v)"
            raise ArgumentError(name=name, reason=reason)
        shape, last = tuple(cache.shape), int(max(self.source.max(), self.target.max()))
        if self.page_size not in shape[1:]:
            size = f"{self.page_size} tokens, as page_size of BeamPages says"
            raise WrongShape(name=name, got=shape, expected=f"(pages, ..) with pages of {size}")
        if shape[0] <= last:
            expected = f"(pages, ..) with more than {last} pages, for page {last} is listed"
            raise WrongShape(name=name, got=shape, expected=expected)


class BeamPages:
    """Which pages each beam lists; memory that only dropped beams had is handed out again.

    It begins with one beam, the prefix. Host memory only: the cache may lie anywhere.

    Attributes:
        page_size: tokens of a page.
        width: most beams.
        length: tokens of each beam, those of the prefix included.
    """

    def __init__(
        self, prefix: Any, prefix_len: int, own: Any, *, page_size: int, width: int
    ) -> None:
        """Take the prefix's pages, which are never written, and others for the beams.

        Args:
            prefix: [pages] that hold the prefix, in order.
            prefix_len: tokens of it.
            own: [pages] for tokens of beams; see `pages_needed` for how many.
            page_size: tokens of a page.
            width: most beams.

        Raises:
            ArgumentError: counts below one, or pages that are listed twice or beyond int32.
            WrongShape: not as many pages as the prefix has, or not one dimension.
        """
        for name, value in (("prefix_len", prefix_len), ("page_size", page_size), ("width", width)):
            checked_count(name, value)
        pages, self._own = _pages(prefix, "prefix"), np.sort(_pages(own, "own"))
        expected = -(-prefix_len // page_size)
        if len(pages) != expected:
            raise WrongShape(name="prefix", got=pages.shape, expected=f"({expected},)")
        if len(np.unique(np.concatenate((pages, self._own)))) < len(pages) + len(self._own):
            raise ArgumentError(name="own", reason="lists a page twice, or one of the prefix")
        full = prefix_len // page_size
        self.page_size, self.width, self.length = page_size, width, prefix_len
        self._prefix, self._suffix = pages[:full], pages[None, full:]

    @staticmethod
    def pages_needed(width: int, tokens: int, prefix_len: int, page_size: int) -> int:
        """Own pages that suffice for so many beams with so many tokens each behind the prefix."""
        return width * -(-(prefix_len % page_size + tokens) // page_size)

    def __len__(self) -> int:
        """Beams there are."""
        return len(self._suffix)

    def advance(self, parents: Any) -> Copies:
        """Let each new beam continue one of the present ones, with room for one more token.

        Args:
            parents: [beams] integers, the beam that each continues; any order, and any of them
                several times or never.

        Returns:
            What to copy before the token is written. At most one page for each beam.

        Raises:
            WrongShape: no beams, or more than the width.
            BadParent: no such beam.
            TooFewPages: own pages do not suffice. Nothing has changed then.
        """
        parents = self._parents(parents)
        suffix, filled = self._suffix[parents], self.length % self.page_size
        writes = np.ones(len(parents), bool)  # to a fresh page
        source = np.empty(0, np.int64)
        if filled:
            last = suffix[:, -1]
            keeps = np.unique(last, return_index=True)[1]  # the first to continue a beam
            writes[keeps] = ~np.isin(last[keeps], self._own)  # the prefix's page is kept as it is
            source = last[writes]
        free = np.setdiff1d(self._own, suffix, assume_unique=False)
        needed = int(writes.sum())
        if needed > len(free):
            raise TooFewPages(needed=needed, free=len(free), own=len(self._own))
        if filled:
            suffix[writes, -1] = free[:needed]
        else:
            suffix = np.concatenate((suffix, free[:needed, None]), axis=1)
        self._suffix, self.length = suffix, self.length + 1
        return Copies(source, suffix[writes, -1] if filled else source, filled, self.page_size)

    def tables(self) -> dict[str, Any]:
        """Arguments of `plan` and `append`: kv_indptr, kv_indices and last_page_len, all int32."""
        beams = len(self)
        shared = np.broadcast_to(self._prefix, (beams, len(self._prefix)))
        listed = np.concatenate((shared, self._suffix), axis=1)
        assert listed.size <= _MOST and listed.max() <= _MOST, "int32 does not hold the table"
        indices = listed.astype(np.int32)
        last = (self.length - 1) % self.page_size + 1
        return {
            "kv_indptr": np.arange(beams + 1, dtype=np.int32) * np.int32(indices.shape[1]),
            "kv_indices": indices.reshape(-1),
            "last_page_len": np.full(beams, last, np.int32),
        }

    def _parents(self, given: Any) -> Ints:
        parents = host_array(given, "parents")
        if parents.ndim != 1 or not 0 < len(parents) <= self.width:
            raise WrongShape(
                name="parents", got=parents.shape, expected=f"(beams,) with 1 to {self.width} beams"
            )
        if not np.issubdtype(parents.dtype, np.integer):
            raise ArgumentError(name="parents", reason=f"are of type {parents.dtype}, not integers")
        wrong = (parents < 0) | (parents >= len(self))
        if wrong.any():
            at = int(wrong.argmax())
            valid = f"the beams there are have numbers 0 to {len(self) - 1}"
            raise BadParent(index=at, value=int(parents[at]), valid=valid)
        return parents.astype(np.int64)


def _pages(given: Any, name: str) -> Ints:
    pages = host_array(given, name)
    if pages.ndim != 1:
        raise WrongShape(name=name, got=pages.shape, expected="(pages,)")
    if len(pages) and (not np.issubdtype(pages.dtype, np.integer) or pages.min() < 0):
        raise ArgumentError(name=name, reason="holds what is no page: integers from 0 on are")
    if len(pages) and pages.max() > _MOST:
        raise ArgumentError(name=name, reason=f"holds page {pages.max()}, and {_MOST} is the last")
    return pages.astype(np.int64)
