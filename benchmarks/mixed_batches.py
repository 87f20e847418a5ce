"""Mixed batches: one prefill chunk at the end of its context, and requests that decode.

The twelve of the table are equal decodes of one context. Others are drawn with a fixed
seed, one chunk each, sizes log-uniform and independent: no record of a server. Batch i is the same
one however many are drawn. Light ones have little of one kind: few decodes, or a short chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from batches import Inputs, Shape, Truth, label, make_inputs
from harness import Case, Check
from prefill_variants import WINDOW, windowed

import warploom as wl

PAGE, DIM = 16, 128
CHUNKS, CONTEXTS, DECODES = (1024, 2048), (8192, 16384), (32, 64, 128)
HEADS = ((32, 8), (32, 32), (64, 8))  # of drawn batches
SOFT_CAP = 5.0  # low, for logits of random inputs are small and the check must see it
SEED = 20261125
SHORTEST, LONGEST = 256, 32768  # contexts of drawn batches


def soft_cap(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return SOFT_CAP * torch.tanh(logits / SOFT_CAP)


@dataclass(frozen=True)
class Kind:
    """What attention is besides causal.

    Attributes:
        name: as shown.
        variant: makes it for warploom.
        truth: the same in float64.
        soft_cap, window: what peers are told; a window counts the query's own key.
    """

    name: str
    variant: Callable[[], wl.Variant]
    truth: Truth = field(default_factory=Truth)
    soft_cap: float | None = None
    window: int | None = None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("causal", wl.Causal),
        Kind("soft-cap", lambda: wl.Causal() & wl.SoftCap(SOFT_CAP), Truth(logits=soft_cap),
             soft_cap=SOFT_CAP),
        Kind("window", lambda: wl.Causal() & wl.SlidingWindow(WINDOW - 1), Truth(mask=windowed),
             window=WINDOW),
    )
}  # fmt: skip


class Sizes(NamedTuple):
    """What drawn batches have, from the least to the most: rows of the chunk, and decodes."""

    chunk: tuple[int, int]
    decodes: tuple[int, int]


DRAWN = Sizes(chunk=(256, 4096), decodes=(8, 256))
LIGHT = Sizes(chunk=(32, 4096), decodes=(1, 8)), Sizes(chunk=(32, 256), decodes=(8, 256))


@dataclass(frozen=True)
class Batch:
    """A mixed batch.

    Attributes:
        name: of its row.
        chunk, context: query rows of the chunk, and its keys; the rows are the last ones.
        decodes: keys of each request that decodes.
        heads: of queries, and of keys and values.
        kind: one of KINDS.
        chunk_last: whether the chunk is the last request of the batch, and not the first.
        dim: head_dim.
        kv_dtype: of keys and values, if another than that of queries.
    """

    name: str
    chunk: int
    context: int
    decodes: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    kind: str = "causal"
    chunk_last: bool = False
    dim: int = DIM
    kv_dtype: torch.dtype | None = None

    @property
    def shape(self) -> Shape:
        q_lens, kv_lens = (1,) * len(self.decodes), self.decodes
        if self.chunk_last:
            q_lens, kv_lens = (*q_lens, self.chunk), (*kv_lens, self.context)
        else:
            q_lens, kv_lens = (self.chunk, *q_lens), (self.context, *kv_lens)
        sizes = *self.heads, self.dim, torch.bfloat16, PAGE, self.kv_dtype
        return Shape(q_lens, kv_lens, *sizes)

    @property
    def case(self) -> Case:
        shape = self.shape
        params: dict[str, Any] = {
            **shape.describe(), "chunk": self.chunk, "context": self.context,
            "decodes": len(self.decodes), "kind": self.kind, "chunk_last": self.chunk_last,
        }  # fmt: skip
        return Case(self.name, 0.0, "us", shape.bytes, params)


def table_batches() -> list[Batch]:
    """The twelve, the shortest first."""
    return [
        Batch(f"{label(chunk)}/{label(context)}/{decodes}", chunk, context, (context,) * decodes)
        for context in CONTEXTS
        for chunk in CHUNKS
        for decodes in DECODES
    ]


def log_uniform(rng: np.random.Generator, low: int, high: int, size: int) -> list[int]:
    """Whole numbers from low to high, as many in each octave."""
    drawn = np.exp(rng.uniform(np.log(low), np.log(high + 1), size)).astype(np.int64)
    return np.clip(drawn, low, high).tolist()  # the logarithm rounds


def drawn_batch(number: int) -> Batch:
    """Batch `number` of the drawn ones: every second one has a soft-cap or a window, in turn."""
    return _drawn(number, DRAWN, ("causal", "soft-cap", "causal", "window")[number % 4])


def light_batch(number: int) -> Batch:
    """Light batch `number`: few decodes and a short chunk in turn; one of four has a window."""
    return _drawn(number, LIGHT[number % 2], "window" if number // 2 % 4 == 3 else "causal")


def _drawn(number: int, sizes: Sizes, kind: str) -> Batch:
    rng = np.random.default_rng((SEED, number))
    (chunk,) = log_uniform(rng, *sizes.chunk, 1)
    (context,) = log_uniform(rng, chunk, LONGEST, 1)
    (count,) = log_uniform(rng, *sizes.decodes, 1)
    decodes = tuple(log_uniform(rng, SHORTEST, LONGEST, count))
    heads = HEADS[int(rng.integers(len(HEADS)))]
    name = f"{number}: {chunk}/{context}/{count}, {heads[0]}/{heads[1]}"
    name += "" if kind == "causal" else f", {kind}"
    return Batch(name, chunk, context, decodes, heads, kind, bool(rng.integers(2)))


def drawn_batches(count: int) -> list[Batch]:
    return [drawn_batch(number) for number in range(count)]


def light_batches(count: int) -> list[Batch]:
    return [light_batch(number) for number in range(count)]


def tiny(batch: Batch) -> Batch:
    """The same batch with a small part of its rows, keys, requests and heads."""
    q_heads, kv_heads = batch.heads
    heads = (q_heads // kv_heads * 2, 2)
    decodes = tuple(
        max(1, keys // 64) for keys in batch.decodes[: max(2, len(batch.decodes) // 32)]
    )
    chunk = max(2, batch.chunk // 64)
    context = max(chunk, batch.context // 64)
    return replace(batch, chunk=chunk, context=context, decodes=decodes, heads=heads, dim=64)


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(Inputs):
    """Neighbouring requests of a batch: rows and page lists of their own, in the same caches."""

    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @cached_property
    def page_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.table


def half(whole: Inputs, begin: int, end: int) -> Half:
    """Requests from begin to end."""
    shape = whole.shape
    kept = slice(begin, end)
    rows = slice(*whole.qo_indptr[[begin, end]].tolist())
    pages = slice(*whole.kv_indptr[[begin, end]].tolist())
    indptr = whole.kv_indptr[begin : end + 1] - pages.start
    part = replace(shape, q_lens=shape.q_lens[kept], kv_lens=shape.kv_lens[kept])
    table = indptr, whole.indices[pages], whole.last_page_len[kept]
    return Half(part, whole.q[rows], whole.k, whole.v, table)


@dataclass(frozen=True)
class Mixed:
    """Tensors of a batch: all requests, the chunk, and those that decode."""

    whole: Inputs
    prefill: Half
    decode: Half
    chunk_last: bool

    def parts(self, output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Rows of the chunk and of decodes, of one output or of two."""
        if isinstance(output, tuple):
            return output
        if self.chunk_last:
            decode, prefill = output.split([len(self.decode.q), len(self.prefill.q)])
            return prefill, decode
        prefill, decode = output.split([len(self.prefill.q), len(self.decode.q)])
        return prefill, decode


def make_mixed(batch: Batch, device: torch.device) -> Mixed:
    whole = make_inputs(batch.shape, device)
    count = len(batch.decodes)
    chunk = (count, count + 1) if batch.chunk_last else (0, 1)
    decodes = (0, count) if batch.chunk_last else (1, count + 1)
    return Mixed(whole, half(whole, *chunk), half(whole, *decodes), batch.chunk_last)


def check_mixed(truth: Truth, mixed: Mixed) -> Check:
    """The larger error of both parts, of those that are computed; NaN if one has any."""
    checks = [truth.check(part) for part in (mixed.prefill, mixed.decode)]

    def error_of(output: Any) -> float:
        parts = zip(checks, mixed.parts(output), strict=True)
        return float(np.max([one.relative_error(part) for one, part in parts if part is not None]))

    return Check(error_of, truth.tolerance, of_replays=True)


def check_of(batch: Batch) -> Callable[[Mixed], Check]:
    return partial(check_mixed, KINDS[batch.kind].truth)


def cases(batches: Sequence[Batch], small: bool) -> list[Batch]:
    return [tiny(batch) for batch in batches] if small else list(batches)
