"""Batches that benchmarks compute: lengths, tensors, and the float64 truth on sampled rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from harness import Check, NotAvailable

SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """Lengths and sizes of one batch.

    Attributes:
        q_lens, kv_lens: query rows and keys of each request.
        q_heads, kv_heads, dim: heads, and the length of each vector.
        dtype: of queries, keys and values.
        page_size: tokens in a page of the cache; 0 stores keys one request after another.
        kv_dtype: of keys and values, if another.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float16
    page_size: int = 0
    kv_dtype: torch.dtype | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def is_even(self) -> bool:
        """Whether all requests have the same lengths, as dense tensors need."""
        return len(set(self.q_lens)) == len(set(self.kv_lens)) == 1

    @property
    def bytes(self) -> int:
        """What must be moved: keys and values once, queries and outputs once."""
        keys = 2 * sum(self.kv_lens) * self.kv_heads * self.stored_dtype.itemsize
        rows = 2 * sum(self.q_lens) * self.q_heads * self.dtype.itemsize
        return (keys + rows) * self.dim

    def pairs(self, window: int | None = None, causal: bool = True) -> int:
        """Visible (query, key) pairs of one head; queries are aligned to the end of the keys."""
        total = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            seen = np.full(q_len, kv_len, np.int64)
            if causal:
                seen = np.arange(kv_len - q_len, kv_len, dtype=np.int64) + 1
            total += int((seen if window is None else np.minimum(seen, window)).sum())
        return total

    def flops(self, window: int | None = None, causal: bool = True) -> int:
        """Operations of both products, over visible pairs only."""
        return 4 * self.dim * self.q_heads * self.pairs(window, causal)

    def describe(self) -> dict[str, object]:
        """What is kept beside a figure."""
        stored = {"kv_dtype": str(self.kv_dtype).removeprefix("torch.")} if self.kv_dtype else {}
        return {
            "batch": self.batch, "q_rows": sum(self.q_lens), "keys": sum(self.kv_lens),
            "longest": max(self.kv_lens), "q_heads": self.q_heads, "kv_heads": self.kv_heads,
            "head_dim": self.dim, "page_size": self.page_size,
            "dtype": str(self.dtype).removeprefix("torch."), **stored,
        }  # fmt: skip


def lengths(kind: str, batch: int, mean: int) -> tuple[int, ...]:
    """Lengths of a batch, the same ones each time.

    Args:
        kind: "constant"; "uniform", mean/2 to mean; "zipf", proportional to 1/rank with this mean,
            shuffled; "skew", the mean or 8 x mean / rank if that is more, shuffled.
        batch: requests.
        mean: see `kind`.
    """
    rng = np.random.default_rng(7)
    rank = np.arange(1, batch + 1)
    if kind == "constant":
        drawn = np.full(batch, mean)
    elif kind == "uniform":
        drawn = rng.integers(mean // 2, mean + 1, batch)
    elif kind == "zipf":
        drawn = np.maximum(1, rng.permutation(batch * mean / rank / (1 / rank).sum()))
    elif kind == "skew":
        drawn = rng.permutation(np.maximum(mean, 8 * mean // rank))
    else:
        raise ValueError(f"lengths {kind!r}; expected constant, uniform, zipf or skew")
    return tuple(int(length) for length in drawn)


def starts(counts: tuple[int, ...]) -> torch.Tensor:
    """int32 [requests + 1] on the CPU: where each request begins."""
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def page_table(
    kv_lens: tuple[int, ...], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kv_indptr, kv_indices, last_page_len, int32 on the CPU; pages lie scattered."""
    pages = tuple(-(-length // page_size) for length in kv_lens)
    indices = np.random.default_rng(11).permutation(sum(pages)).astype(np.int32)
    last = torch.tensor([(n - 1) % page_size + 1 for n in kv_lens], dtype=torch.int32)
    return starts(pages), torch.from_numpy(indices), last


@dataclass(frozen=True)
class Inputs:
    """One batch.

    Attributes:
        q: [rows, q heads, dim].
        k, v: [tokens, kv heads, dim], or caches [pages, page size, kv heads, dim].
    """

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @cached_property
    def qo_indptr(self) -> torch.Tensor:
        return starts(self.shape.q_lens)

    @cached_property
    def kv_indptr(self) -> torch.Tensor:
        """In tokens, or in pages."""
        return self.page_table[0] if self.shape.page_size else starts(self.shape.kv_lens)

    @cached_property
    def page_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `page_table`; for paged caches."""
        return page_table(self.shape.kv_lens, self.shape.page_size)

    @property
    def indices(self) -> torch.Tensor:
        return self.page_table[1]

    @property
    def last_page_len(self) -> torch.Tensor:
        return self.page_table[2]

    def stored(self, cache: torch.Tensor, request: int) -> torch.Tensor:
        """Keys or values of a request, [tokens, kv heads, dim]."""
        begin, end = self.kv_indptr[request : request + 2].tolist()
        if not self.shape.page_size:
            return cache[begin:end]
        pages = self.indices[begin:end].long().to(cache.device)
        return cache[pages].flatten(0, 1)[: self.shape.kv_lens[request]]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as [batch, heads, length, dim]: the same memory, or a copy of what pages hold.

        Raises:
            NotAvailable: the lengths differ.
        """
        if not self.shape.is_even:
            raise NotAvailable("dense tensors need equal lengths")
        batch = self.shape.batch
        q, k, v = self.q, self.k, self.v
        if self.shape.page_size:
            k, v = (torch.cat([self.stored(x, i) for i in range(batch)]) for x in (k, v))
        q, k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return q, k, v


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Random tensors, as a projection and a cache leave them."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=shape.dtype)

    size = shape.page_size
    stored = (sum(-(-n // size) for n in shape.kv_lens), size) if size else (sum(shape.kv_lens),)
    keys = (*stored, shape.kv_heads, shape.dim)
    q = random(sum(shape.q_lens), shape.q_heads, shape.dim)
    k, v = (random(*keys).to(shape.stored_dtype) for _ in range(2))
    return Inputs(shape, q, k, v)


def _same_vector(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return x


def _same_logits(
    logits: torch.Tensor, head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor
) -> torch.Tensor:
    return logits


def causal(head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    return kv_pos <= q_pos


def everything(head: int, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    return kv_pos >= 0


@dataclass(frozen=True)
class Truth:
    """What attention is changed to, in torch's float64: positions are [rows, 1] and [1, keys].

    Attributes:
        mask: (head, q_pos, kv_pos) -> visible.
        logits: (logits, head, q_pos, kv_pos) -> logits.
        rotate: (vectors, positions) -> vectors, of queries and keys.
        rotates_keys: whether of keys, too; else they lie rotated.
        tolerance: of the relative error.
    """

    mask: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] = causal
    logits: Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], torch.Tensor] = _same_logits
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _same_vector
    rotates_keys: bool = True
    tolerance: float = 1e-2  # bf16; a wrong mask or scale is far above it

    def check(self, inputs: Inputs) -> Check:
        """Compares sampled rows and heads of the first, middle and last request."""
        shape = inputs.shape
        requests = sorted({0, shape.batch // 2, shape.batch - 1})
        heads = sorted({0, shape.q_heads // 2, shape.q_heads - 1})
        rows = {i: self._rows(inputs, i) for i in requests}
        sampled = [(i, head) for i in requests for head in heads]
        expected = torch.cat([self._outputs(inputs, i, rows[i], head) for i, head in sampled])

        def relative_error(output: torch.Tensor) -> float:
            if output.dim() == 4:  # [batch, heads, length, dim]
                output = output.transpose(1, 2).flatten(0, 1)
            begins = inputs.qo_indptr.tolist()
            got = torch.cat([output[begins[i] + rows[i], head] for i, head in sampled])
            return float((got.double() - expected).norm() / expected.norm())

        return Check(relative_error, self.tolerance)

    def _rows(self, inputs: Inputs, request: int) -> torch.Tensor:
        count = inputs.shape.q_lens[request]
        sampled = torch.linspace(0, count - 1, min(SAMPLED_ROWS, count), device=inputs.q.device)
        return sampled.long()

    def _outputs(self, inputs: Inputs, request: int, rows: torch.Tensor, head: int) -> torch.Tensor:
        shape = inputs.shape
        begin, kv_head = int(inputs.qo_indptr[request]), head * shape.kv_heads // shape.q_heads
        q = inputs.q[begin + rows, head].double()
        k, v = (inputs.stored(x, request)[:, kv_head].double() for x in (inputs.k, inputs.v))
        kv_pos = torch.arange(len(k), device=q.device)
        q_pos = rows + shape.kv_lens[request] - shape.q_lens[request]
        q, k = self.rotate(q, q_pos), self.rotate(k, kv_pos) if self.rotates_keys else k
        at = head, q_pos[:, None], kv_pos[None, :]
        logits = self.logits((q @ k.T) * shape.dim**-0.5, *at)
        return logits.masked_fill(~self.mask(*at), -torch.inf).softmax(-1) @ v


def even_batch(length: int, on_gpu: bool, dim: int = 128) -> Shape:
    """Equal requests: 16 with 16 heads, or a few on a CPU."""
    batch, heads = (16, 16) if on_gpu else (2, 2)
    return Shape((length,) * batch, (length,) * batch, heads, heads, dim)


def label(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)
