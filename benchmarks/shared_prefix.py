"""Decode of requests that share a prefix, suffixes of 128 keys, bf16, pages of 16.

    python benchmarks/shared_prefix.py [--quick] [--only "warploom,single format"] [--out FOLDER]

One query row a request, heads of 128. Work is what must be moved: each key and value once, however
many requests share it. The composed format and the single one take the same page table and the same
caches; the single one reads the prefix once for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import peers_flashinfer as flashinfer
import torch
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Implementation,
    Report,
    Thunk,
    arguments,
    chosen,
    copies_needed,
    copy_ceiling,
    time_one,
)

import warploom as wl
from warploom.codegen.source import TileConfig

PAGE, SUFFIX, DIM = 16, 128, 128
PREFIXES, BATCHES, HEADS = (1024, 8192, 32768), (16, 64), ((32, 32), (32, 8))
TOLERANCE = 1e-2  # relative, bf16 against float64


@dataclass(frozen=True)
class Shared:
    """Queries [batch, q heads, dim], a cache [pages, 2, page, kv heads, dim] and its page table."""

    q: torch.Tensor
    cache: torch.Tensor
    table: dict[str, Any]
    prefix: int

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache[:, 0], self.cache[:, 1]


def page_table(batch: int, prefix: int, suffix: int = SUFFIX) -> dict[str, Any]:
    """Of requests that share their first keys, and have as many others each."""
    pages, own = prefix // PAGE, suffix // PAGE
    parts = [wl.Part(range(batch), range(pages))]
    parts += [wl.Part([i], range(pages + i * own, pages + (i + 1) * own)) for i in range(batch)]
    return wl.compose(parts, page_size=PAGE)


def make_inputs(case: Case, device: torch.device) -> Shared:
    p = case.params
    pages = (p["prefix"] + p["batch"] * SUFFIX) // PAGE
    shape = (pages, 2, PAGE, p["kv_heads"], DIM)
    return Shared(
        q=torch.randn(p["batch"], p["q_heads"], DIM, device=device, dtype=torch.bfloat16),
        cache=torch.randn(shape, device=device, dtype=torch.bfloat16),
        table=page_table(p["batch"], p["prefix"]),
        prefix=p["prefix"],
    )


def planned(
    kv_format: wl.Paged, inputs: Shared, tile: TileConfig | None = None
) -> wl.AttentionWrapper:
    """A wrapper that has planned the batch, with a tile of its choice or with this one."""
    batch, heads, dim = inputs.q.shape
    attention = declared(kv_format, heads, inputs.cache.shape[3], dim, inputs.q.device, tile)
    attention.plan(list(range(batch + 1)), **inputs.table)
    return attention


def declared(
    kv_format: wl.Paged,
    q_heads: int,
    kv_heads: int,
    dim: int,
    device: torch.device,
    tile: TileConfig | None = None,
) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal(),
        kv_format=kv_format,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        device=device,
        tile=tile,
    )


def warploom(kv_format: wl.Paged, inputs: Sequence[Shared]) -> list[Thunk]:
    attention = planned(kv_format, inputs[0])
    return [partial(attention.run, case.q, case.kv) for case in inputs]


IMPLEMENTATIONS = (
    Implementation("warploom", partial(warploom, wl.Composed(PAGE))),
    Implementation("single format", partial(warploom, wl.Paged(PAGE))),
    flashinfer.TWO_LEVELS,
)


def check_against_float64(inputs: Shared) -> Check:
    """Compares all heads of the first, middle and last request."""
    batch = len(inputs.q)
    return check_rows(inputs, [(i, i, 0) for i in sorted({0, batch // 2, batch - 1})])


def check_rows(inputs: Shared, sampled: Sequence[tuple[int, int, int]]) -> Check:
    """Compares all heads of some rows: each is a row, its request, and keys behind it."""
    expected = torch.stack([_truth(inputs, *one) for one in sampled])
    rows = [row for row, _, _ in sampled]

    def relative_error(output: torch.Tensor) -> float:
        return float((output[rows].double() - expected).norm() / expected.norm())

    return Check(relative_error, TOLERANCE)


def _truth(inputs: Shared, row: int, request: int, hidden: int) -> torch.Tensor:
    group, dim = inputs.q.shape[1] // inputs.cache.shape[3], inputs.q.shape[2]
    indptr, indices = inputs.table["kv_indptr"], inputs.table["kv_indices"]
    pages = torch.from_numpy(indices[indptr[request] : indptr[request + 1]]).long()
    kv = inputs.cache[pages.to(inputs.cache.device)].double()
    k, v = (kv[:, i].flatten(0, 1).repeat_interleave(group, 1) for i in range(2))
    k, v = k[: len(k) - hidden], v[: len(v) - hidden]
    logits = torch.einsum("hd,nhd->hn", inputs.q[row].double(), k) * dim**-0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), v)


def case_of(batch: int, heads: tuple[int, int], prefix: int) -> Case:
    q_heads, kv_heads = heads
    cache = 4 * (prefix + batch * SUFFIX) * kv_heads * DIM
    return Case(
        name=f"{batch} x {prefix}, {q_heads}/{kv_heads}",
        work=(cache + 4 * batch * q_heads * DIM) / 1e9,
        unit="GB/s",
        input_bytes=cache,
        params={
            "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "prefix": prefix,
            "suffix": SUFFIX, "head_dim": DIM, "page_size": PAGE, "dtype": "bfloat16",
        },
    )  # fmt: skip


def cases_on(device: torch.device) -> list[Case]:
    """All of them on a GPU; on a CPU, one that is small."""
    if device.type != "cuda":
        return [case_of(4, (4, 2), 256)]
    return [case_of(b, h, p) for h in HEADS for b in BATCHES for p in PREFIXES]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    device: torch.device = options.device
    effort = QUICK if options.quick else Effort()
    torch.manual_seed(0)
    report = Report("shared_prefix", device, options.out)
    report.add(copy_ceiling("shared_prefix", device, effort))
    for case in cases_on(device):
        inputs = [make_inputs(case, device) for _ in range(copies_needed(case, device))]
        check = check_against_float64(inputs[0])
        for implementation in chosen(IMPLEMENTATIONS, options.only):
            report.add(
                time_one("shared_prefix", case, implementation, inputs, check, effort, device)
            )
    report.finish()


if __name__ == "__main__":
    main()
