"""Attention as FlashInfer's calls define it, in plain NumPy float64, and batches in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Asked:
    """What shapes the scores of a request.

    Attributes:
        mask: bools [rows, keys], in place of causality.
        factor: what q.k is multiplied with beside sm_scale; `v_scale` what the output is.
        sinks: [heads].
    """

    causal: bool = False
    window: int = -1
    cap: float = 0.0
    encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    sm_scale: float | None = None
    factor: float = 1.0
    v_scale: float = 1.0
    mask: Any = None
    sinks: Any = None

    @property
    def planned(self) -> dict[str, Any]:
        """Arguments of FlashInfer's `plan`, but for the mask and causality."""
        return {
            "window_left": self.window,
            "logits_soft_cap": self.cap or None,
            "pos_encoding_mode": self.encoding,
            "rope_scale": self.rope_scale,
            "rope_theta": self.rope_theta,
            "sm_scale": self.sm_scale,
        }


def attend(q: Any, k: Any, v: Any, asked: Asked) -> tuple[Array, Array]:
    """The output [rows, heads, lanes] and log-sum-exps in base 2 [rows, heads] of one request.

    Args:
        q: [rows, heads, lanes].
        k, v: [keys, kv heads, lanes].
    """
    q, k, v = (np.asarray(torch.as_tensor(x).double()) for x in (q, k, v))
    rows, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    row, column = np.arange(rows)[:, None], np.arange(keys)[None]
    position = row + keys - rows
    if asked.encoding == "ROPE_LLAMA":
        q, k = _rotated(q, position[:, 0], asked), _rotated(k, column[0], asked)
    scale = q.shape[-1] ** -0.5 if asked.sm_scale is None else asked.sm_scale
    logits = np.einsum("rhd,khd->hrk", q, k) * scale * asked.factor
    if asked.encoding == "ALIBI":
        logits = logits + _slopes(q.shape[1])[:, None, None] * (column - row)
    if asked.cap:
        logits = asked.cap * np.tanh(logits / asked.cap)
    seen = np.ones((rows, keys), bool)
    if asked.mask is not None:
        seen = np.asarray(asked.mask, bool)
    elif asked.causal:
        seen = column <= position
    if asked.window >= 0:
        seen = seen & (column >= position - asked.window)
    return _softmax(np.where(seen, logits, -np.inf), v, asked)


def _softmax(logits: Array, v: Array, asked: Asked) -> tuple[Array, Array]:
    if asked.sinks is not None:  # one more key, without a value
        sink = np.asarray(torch.as_tensor(asked.sinks).double())
        column = np.broadcast_to(sink[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate((logits, column), axis=2)
        v = np.concatenate((v, np.zeros((1, *v.shape[1:]))))
    greatest = logits.max(axis=2, keepdims=True, initial=-1e300)
    weights = np.exp(logits - greatest)
    total = weights.sum(axis=2)
    is_empty = total == 0
    shares = weights / np.where(is_empty, 1.0, total)[..., None]
    out = np.einsum("hrk,khd->rhd", shares, v) * asked.v_scale
    lse = np.where(is_empty, -np.inf, np.log(np.where(is_empty, 1, total)) + greatest[..., 0])
    return out, lse.T / np.log(2)


def _rotated(x: Array, position: Array, asked: Asked) -> Array:
    """Lane i is paired with lane i + half of them."""
    half = x.shape[-1] // 2
    frequency = asked.rope_theta ** (-np.arange(half) / half) / asked.rope_scale
    angle = position[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=-1
    )


def _slopes(heads: int) -> Array:
    whole = 2 ** int(np.floor(np.log2(heads)))
    first = 2.0 ** (-8.0 * np.arange(1, whole + 1) / whole)
    others = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - whole) + 1, 2) / whole)
    return np.concatenate((first, others))


@dataclass(frozen=True)
class Batch:
    """Requests over a paged cache, whose pages lie in any order.

    Attributes:
        q: [rows, heads, lanes] of all.
        keys, values: [tokens, kv heads, lanes] of each request.
        cache: (k, v) in the layout that was asked for.
        qo_indptr, indptr, indices, last_page_len: int32, as FlashInfer takes them.
    """

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: tuple[torch.Tensor, torch.Tensor]
    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(
        cls, lengths: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), lanes: int = 32,
        page_size: int = 4, layout: str = "NHD", seed: int = 0, kv_dtype: Any = torch.float32,
    ) -> Batch:  # fmt: skip
        """From (rows, keys) of each request."""
        rng = torch.Generator().manual_seed(seed)
        pages = [-(-keys // page_size) for _, keys in lengths]
        total = sum(pages) + 3
        indices = torch.randperm(total, generator=rng)[: sum(pages)].int()
        shape = (total, page_size, heads[1], lanes)
        stored = [torch.randn(shape, generator=rng).to(kv_dtype) for _ in range(2)]
        begins = np.cumsum([0, *pages])
        spans = list(zip(begins[:-1], pages, lengths, strict=True))
        per_request = [
            [x[indices[b : b + n].long()].float().flatten(0, 1)[:keys] for b, n, (_, keys) in spans]
            for x in stored
        ]
        last = [(keys - 1) % page_size + 1 if keys else 0 for _, keys in lengths]
        if layout == "HND":
            stored = [x.transpose(1, 2).contiguous() for x in stored]
        rows = np.cumsum([0, *(rows for rows, _ in lengths)])
        q = torch.randn(int(rows[-1]), heads[0], lanes, generator=rng)
        return cls(
            q, per_request[0], per_request[1], (stored[0], stored[1]),
            torch.as_tensor(rows).int(), torch.as_tensor(begins).int(), indices,
            torch.tensor(last, dtype=torch.int32),
        )  # fmt: skip

    def expected(self, asked: list[Asked] | Asked) -> tuple[Array, Array]:
        """Of all rows."""
        count = len(self.keys)
        each = asked if isinstance(asked, list) else [asked] * count
        rows = self.q.split(self.qo_indptr.diff().tolist())
        found = [attend(*one) for one in zip(rows, self.keys, self.values, each, strict=True)]
        heads, lanes = self.q.shape[1:]
        empty = np.zeros((0, heads, lanes)), np.zeros((0, heads))
        outs, sums = zip(empty, *found, strict=True)
        return np.concatenate(outs), np.concatenate(sums)


def assert_close(got: Any, expected: tuple[Array, ...], bound: float = 2e-5) -> None:
    """Compare an output and log-sum-exps."""
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.double().numpy(), other, atol=bound, rtol=bound)
