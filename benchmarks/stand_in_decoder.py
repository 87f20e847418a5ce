"""A decoder with random weights, whose step is captured once: tables, plan, layers, next tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, silu

import warploom as wl

PAGE = 16


@dataclass(frozen=True)
class DecoderShape:
    """Widths of a decoder, and how many requests it decodes from which length on, for how long."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    requests: int
    length: int
    steps: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def pages(self) -> int:
        """Of one request."""
        return -(-(self.length + self.steps) // PAGE)

    @property
    def declared(self) -> dict[str, Any]:
        """Of a wrapper."""
        return {
            "kv_format": wl.Paged(PAGE), "num_q_heads": self.q_heads,
            "num_kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype,
        }  # fmt: skip


class Tables:
    """Page tables that the device advances by a token for each request, in memory that stays."""

    def __init__(self, shape: DecoderShape, device: torch.device) -> None:
        requests, pages = shape.requests, shape.pages
        self._shape = shape
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.rows = torch.arange(requests + 1, **options)
        self.lens = torch.empty(requests, **options)
        self.indptr = torch.zeros(requests + 1, **options)
        self.indices = torch.empty(requests * pages, **options)
        self.last = torch.empty(requests, **options)
        self._first = pages * torch.arange(requests, **options)
        self._slots = torch.arange(requests * pages, **options)
        self.reset()

    def reset(self) -> None:
        self.lens.fill_(self._shape.length)

    def advance(self) -> None:
        """One more token for each request; kernels only, so that a graph can hold it."""
        self.lens += 1
        torch.cumsum((self.lens + PAGE - 1) // PAGE, 0, dtype=torch.int32, out=self.indptr[1:])
        owner = torch.searchsorted(self.indptr[1:], self._slots, right=True, out_int32=True)
        owner.clamp_(max=len(self.lens) - 1)  # slots behind the last page, which nobody reads
        pages = self._first[owner] + self._slots - self.indptr[owner]
        torch.clamp(pages, max=len(self._slots) - 1, out=self.indices)
        torch.sub(self.lens - 1, (self.lens - 1) // PAGE * PAGE - 1, out=self.last)

    def on_host(self, lens: np.ndarray) -> tuple[np.ndarray, ...]:
        """What `advance` makes, by NumPy, as an engine's host would: arguments of `plan`."""
        pages = -(-lens // PAGE)
        indptr = np.concatenate(([0], pages.cumsum())).astype(np.int32)
        shift = np.arange(len(lens)) * self._shape.pages - indptr[:-1]
        indices = np.arange(indptr[-1]) + np.repeat(shift, pages)
        rows = np.arange(len(lens) + 1, dtype=np.int32)
        last = ((lens - 1) % PAGE + 1).astype(np.int32)
        return rows, indptr, indices.astype(np.int32), last


class Weights:
    """Of all layers, and a cache for each; scaled so that activations stay of one size."""

    def __init__(self, shape: DecoderShape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            made = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
            return (made / size[-1] ** 0.5).to(shape.dtype)

        hidden, heads = shape.hidden, shape.q_heads + 2 * shape.kv_heads
        self.layers = [
            (
                random(heads * shape.head_dim, hidden),
                random(hidden, shape.q_heads * shape.head_dim),
                random(2 * shape.ffn, hidden),
                random(hidden, shape.ffn),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = random(shape.vocabulary, hidden)
        size = (2, shape.requests * shape.pages, PAGE, shape.kv_heads, shape.head_dim)
        self.caches = [random(*size) for _ in range(shape.layers)]


class Decoder:
    """Decodes a token for each request by `step`: a replay on a GPU, a call on the CPU.

    Attributes:
        tokens: int64 [requests], the last ones; a step reads them where it has written them.
    """

    def __init__(
        self, shape: DecoderShape, weights: Weights, device: torch.device, plans: bool
    ) -> None:
        """Args:
        plans: whether the step plans attention itself, from tables on the device.
        """
        self.shape, self.tables, self._weights = shape, Tables(shape, device), weights
        self.plans, on_gpu = plans, device.type == "cuda"
        most = shape.length + shape.steps
        bounds = wl.Bounds(shape.requests, shape.requests, most, shape.requests * shape.pages)
        self._attention = wl.AttentionWrapper(
            wl.Causal(), bounds=bounds, cuda_graph=on_gpu, device=device, **shape.declared
        )
        self._append = wl.Appender(
            kv_format=wl.Paged(PAGE), num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            dtype=shape.dtype, device=device,
        )  # fmt: skip
        self.tokens = torch.empty(shape.requests, dtype=torch.int64, device=device)
        self.reset()
        self.step: Callable[[], None] = self._captured() if on_gpu else self._compute

    def reset(self) -> None:
        """To the first step."""
        self.tables.reset()
        self.tokens.copy_(torch.arange(self.shape.requests) % self.shape.vocabulary)

    def plan(self, lens: np.ndarray) -> None:
        """By the host, for the step with these lengths, the new tokens counted."""
        self._attention.plan(*self.tables.on_host(lens))

    def _captured(self) -> Callable[[], None]:
        if not self.plans:
            self.plan(np.full(self.shape.requests, self.shape.length + 1))
        for _ in range(2):  # what is compiled or allocated on first use
            self._compute()
        if self.plans:
            self._attention.check_plan()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        self.reset()
        return graph.replay

    def _compute(self) -> None:
        tables, shape, weights = self.tables, self.shape, self._weights
        tables.advance()
        arguments = tables.rows, tables.indptr, tables.indices, tables.last
        if self.plans:
            self._attention.plan(*arguments)
        x = weights.embedding[self.tokens]
        heads = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        for (qkv, out, up, down), cache in zip(weights.layers, weights.caches, strict=True):
            projected = linear(rms_norm(x, (shape.hidden,)), qkv)
            q, k, v = projected.view(len(x), sum(heads), shape.head_dim).split(heads, dim=1)
            self._append(k, v, tuple(cache), *arguments)
            attended = self._attention.run(q, tuple(cache))
            x = x + linear(attended.flatten(1), out)
            gate, value = linear(rms_norm(x, (shape.hidden,)), up).chunk(2, dim=1)
            x = x + linear(silu(gate) * value, down)
        logits = linear(rms_norm(x, (shape.hidden,)), weights.embedding)
        torch.argmax(logits, dim=1, out=self.tokens)
