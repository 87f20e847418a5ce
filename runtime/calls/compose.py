"""Page tables of requests that share pages: from parts, from levels, or from a tree of tokens.

Sharing is expressed by page numbers only: requests whose page lists begin with the same pages share
them. `AttentionWrapper.plan` detects shared pages in any page table; these functions are for
callers that do not have a page table yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import numpy as np

from warploom.errors import ArgumentError, WrongShape
from warploom.runtime.declaring.declare import checked_count, checked_number
from warploom.runtime.formats.lists import block_list, indptr
from warploom.runtime.tensors.tensors import host_int32
from warploom.scheduler.model.bounds import INT32_MAX


@dataclass(frozen=True)
class Part:
    """Pages that some requests read.

    Attributes:
        requests: numbers of these requests, from 0 on.
        pages: numbers of their pages, from 0 on, in order.
        last_page_len: tokens in the last page, or None if it is full; ignored if there are no
            pages. Only the last part of a request may end within a page.
    """

    requests: Sequence[int]
    pages: Sequence[int]
    last_page_len: int | None = None


@dataclass(frozen=True)
class Level:
    """One format of a list of formats (FlashInfer, figure 3): block rows of neighbouring requests.

    Attributes:
        request_indptr: int32 [groups + 1], where each group's requests begin.
        kv_indptr: int32 [groups + 1], where each group's pages begin.
        kv_indices: int32, pages.
        last_page_len: int32 [groups], tokens in each group's last page; ignored for a group without
            pages. None: all pages are full.
    """

    request_indptr: Any
    kv_indptr: Any
    kv_indices: Any
    last_page_len: Any = None

    def parts(self) -> Iterator[Part]:
        """The groups, one by one.

        Raises:
            BadIndptr, WrongDType, WrongShape: an array is malformed.
        """
        groups = indptr(self.request_indptr, "request_indptr")
        begin = indptr(self.kv_indptr, "kv_indptr", entries=len(groups))
        pages = block_list(self.kv_indices, int(begin[-1]), "a Level counts pages")
        last = [None] * (len(groups) - 1)
        if self.last_page_len is not None:
            given = host_int32(self.last_page_len, "last_page_len")
            if len(given) != len(last):
                raise WrongShape(name="last_page_len", got=given.shape, expected=f"({len(last)},)")
            last = given.tolist()
        for i, tokens in enumerate(last):
            requests = range(int(groups[i]), int(groups[i + 1]))
            yield Part(requests, pages[begin[i] : begin[i + 1]].tolist(), tokens)


@dataclass
class RadixTree:
    """Token sequences that share the whole pages of their common prefixes, over several levels.

    Pages are numbered in the order of first use, from `first_page` on.

    Attributes:
        page_size: tokens of a page.
        first_page: number of the first page.
        num_pages: pages in use.
        tables: pages of each sequence, in the order of insertion.
        lengths: tokens of each sequence.
        fresh: for each sequence, the index of the first page in its table that was not there when
            the sequence was inserted: from there on its keys and values have to be computed.

    Raises:
        ArgumentError: the page size is below 1, or the first page negative.
    """

    page_size: int
    first_page: int = 0
    num_pages: int = field(default=0, init=False)
    tables: list[list[int]] = field(default_factory=list, init=False)
    lengths: list[int] = field(default_factory=list, init=False)
    fresh: list[int] = field(default_factory=list, init=False)
    _root: dict[bytes, tuple[int, dict[bytes, Any]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        checked_count("page_size", self.page_size)
        checked_number("first_page", self.first_page)

    @classmethod
    def from_tokens(
        cls, sequences: Iterable[Any], page_size: int, *, first_page: int = 0
    ) -> RadixTree:
        """A tree of sequences.

        Args:
            sequences: each is a list or an array of token numbers.
            page_size: tokens of a page.
            first_page: number of the first page.

        Raises:
            ArgumentError: `sequences` cannot be iterated over, the page size is below 1, or the
                first page is negative.
            WrongDType, WrongShape: a sequence is no list of integers, see `insert`.
        """
        tree = cls(page_size, first_page)
        if not isinstance(sequences, Iterable):
            reason = f"is {sequences!r}; expected one list of token numbers for each sequence"
            raise ArgumentError(name="sequences", reason=reason)
        for tokens in sequences:
            tree.insert(tokens)
        return tree

    def insert(self, tokens: Any) -> int:
        """Add a sequence.

        Args:
            tokens: token numbers, [length], of any integer type whose values fit into int32.

        Returns:
            The sequence's number, which is its request's number.

        Raises:
            WrongDType, WrongShape: `tokens` is not one dimension of integers.
            ArgumentError: a number does not fit into int32.
        """
        array = host_int32(tokens, "tokens")
        whole = len(array) // self.page_size
        children = self._root
        table: list[int] = []
        shared = True
        for page in array[: whole * self.page_size].reshape(whole, self.page_size):
            key = page.tobytes()
            if shared and key not in children:
                shared = False
                self.fresh.append(len(table))
            found = children.get(key) or children.setdefault(key, (self._new_page(), {}))
            table.append(found[0])
            children = found[1]
        if shared:
            self.fresh.append(len(table))
        if len(array) > whole * self.page_size:
            table.append(self._new_page())
        self.tables.append(table)
        self.lengths.append(len(array))
        return len(self.tables) - 1

    def _new_page(self) -> int:
        self.num_pages += 1
        return self.first_page + self.num_pages - 1


def compose(
    source: RadixTree | Iterable[Part | Level],
    *,
    num_requests: int | None = None,
    page_size: int | None = None,
) -> dict[str, Any]:
    """The page table of requests that share pages, as arguments of `plan` for `Composed` caches.

    Args:
        source: a tree of token sequences; or parts and levels, in the order of keys: a request
            reads the pages of its parts, one part after the other.
        num_requests: for parts: number of requests; None: up to the last request in a part.
        page_size: for parts: tokens of a page; a tree has its own page size.

    Returns:
        kv_indptr, kv_indices and last_page_len: `plan(qo_indptr, **compose(...))`.

    Raises:
        ArgumentError: a request has pages behind a page that is not full, or is out of range; or an
            argument is no list of parts, no list of integers, or no page size.
        BadIndptr, WrongDType, WrongShape: a level's arrays are malformed.
    """
    if isinstance(source, RadixTree):
        if page_size not in (None, source.page_size):
            reason = f"is {page_size}, but the tree has pages of {source.page_size}"
            raise ArgumentError(name="page_size", reason=reason)
        last = [(n - 1) % source.page_size + 1 if n else 0 for n in source.lengths]
        return _page_table(source.tables, last)
    if page_size is None:
        raise ArgumentError(name="page_size", reason="parts need it")
    checked_count("page_size", page_size)
    parts = _parts(source, page_size)
    named = max((max(part.requests, default=-1) for part in parts), default=-1) + 1
    count = named if num_requests is None else checked_number("num_requests", num_requests)
    if named > count:
        reason = f"a part names request {named - 1}, but there are {count}"
        raise ArgumentError(name="num_requests", reason=reason)
    tables: list[list[int]] = [[] for _ in range(count)]
    last = [0] * count
    for part in parts:
        _append(part, tables, last, page_size)
    return _page_table(tables, last)


def _parts(source: Any, page_size: int) -> list[Part]:
    """The parts of a source, including the groups of levels, with lists of Python ints."""
    if isinstance(source, (Part, Level)) or not isinstance(source, Iterable):
        shown = f"one {type(source).__name__}" if isinstance(source, (Part, Level)) else source
        reason = f"is {shown}; expected a RadixTree, or a list such as [Part(requests, pages), ...]"
        raise ArgumentError(name="source", reason=reason)
    parts: list[Part] = []
    for at, given in enumerate(source):
        if isinstance(given, Part):
            parts.append(_checked(given, f"source[{at}]", page_size))
        elif isinstance(given, Level):
            for group, part in enumerate(given.parts()):
                parts.append(_checked(part, f"group {group} of source[{at}]", page_size))
        else:
            reason = f"holds {given!r}; expected Part(requests, pages) or Level(...)"
            raise ArgumentError(name="source", reason=reason)
    return parts


def _checked(part: Part, place: str, page_size: int) -> Part:
    """The part with lists of Python ints; refuses a wrong `last_page_len`."""
    requests, pages = _ints("requests", part.requests), _ints("pages", part.pages)
    tokens = page_size if part.last_page_len is None else part.last_page_len
    if pages and not (isinstance(tokens, (int, np.integer)) and 1 <= tokens <= page_size):
        count = f"{len(pages)} page{'s' if len(pages) > 1 else ''}"
        reason = f"is {tokens!r} in {place}, which has {count}; expected 1 to {page_size}"
        raise ArgumentError(name="last_page_len", reason=reason)
    return replace(part, requests=requests, pages=pages)


def _ints(name: str, given: Any) -> list[int]:
    try:
        numbers = [index(number) for number in given]
    except TypeError:
        reason = f"{name} are {given!r}; expected a list of whole numbers, such as [0, 1]"
        raise ArgumentError(name="Part", reason=reason) from None
    if max(numbers, default=0) > INT32_MAX:
        raise ArgumentError(name=name, reason=f"{max(numbers)} is beyond {INT32_MAX}")
    return numbers


def _append(part: Part, tables: list[list[int]], last: list[int], page_size: int) -> None:
    pages = part.pages
    if len(set(part.requests)) < len(part.requests) or min(part.requests, default=0) < 0:
        reason = f"a part is for requests {part.requests}; expected each once, from 0 on"
        raise ArgumentError(name="requests", reason=reason)
    if min(pages, default=0) < 0:
        raise ArgumentError(name="pages", reason=f"{min(pages)} is no page of a cache")
    if not pages:
        return
    for request in part.requests:
        if tables[request] and last[request] != page_size:
            reason = (
                f"request {request} has {last[request]} of {page_size} tokens in the last page of "
                "a part, and another part after it; share full pages only"
            )
            raise ArgumentError(name="parts", reason=reason)
        tables[request] += pages
        last[request] = page_size if part.last_page_len is None else part.last_page_len


def _page_table(tables: Sequence[Sequence[int]], last: Sequence[int]) -> dict[str, Any]:
    return {
        "kv_indptr": np.cumsum([0, *map(len, tables)]).astype(np.int32),
        "kv_indices": np.array([page for table in tables for page in table], np.int32),
        "last_page_len": np.array(last, np.int32),
    }
