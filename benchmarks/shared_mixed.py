"""A chunk of a prompt beside decodes, all over one shared prefix, bf16, pages of 16.

    python benchmarks/shared_mixed.py [--quick] [--only "one plan,one tile"] [--out FOLDER]

Each request has 4,096 keys of its own, of which those of the chunk are the last. The composed
format reads the prefix once for all, in one launch: with what a wrapper chooses ("one plan"), and
with one tile for prefills and decodes. The single format reads the prefix for each request, and
chooses, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
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
    matmul_ceiling,
    time_one,
)
from shared_prefix import DIM, PAGE, TOLERANCE, declared

import warploom as wl

NAME, OWN, SAMPLED_ROWS = "shared_mixed", 4096, 16
SWITCH = "WARPLOOM_MIXED_ROLES"
HEADS, PREFIXES = ((32, 8), (32, 32)), (1024, 4096)
MIXES = ((1024, 32), (1024, 64), (2048, 64), (512, 128))  # rows of the chunk, decodes


@dataclass(frozen=True)
class Shared:
    """Queries [rows, q heads, dim], the chunk's first; a cache [pages, 2, page, kv heads, dim]."""

    q: torch.Tensor
    cache: torch.Tensor
    table: dict[str, Any]
    chunk: int

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache[:, 0], self.cache[:, 1]

    @property
    def qo_indptr(self) -> np.ndarray[Any, Any]:
        return np.append(0, np.arange(self.chunk, len(self.q) + 1))


def page_table(requests: int, prefix: int, own: int) -> dict[str, Any]:
    """Of requests that share their first keys, and have as many others each."""
    shared, pages = prefix // PAGE, own // PAGE
    parts = [wl.Part(range(requests), range(shared))]
    fresh = [shared + i * pages for i in range(requests + 1)]
    parts += [wl.Part([i], range(fresh[i], fresh[i + 1])) for i in range(requests)]
    return wl.compose(parts, page_size=PAGE)


def make_inputs(case: Case, device: torch.device) -> Shared:
    p = case.params
    requests = p["decodes"] + 1
    pages = (p["prefix"] + requests * p["own"]) // PAGE
    q, cache = (p["chunk"] + p["decodes"], p["q_heads"]), (pages, 2, PAGE, p["kv_heads"])
    return Shared(
        q=torch.randn(*q, DIM, device=device, dtype=torch.bfloat16),
        cache=torch.randn(*cache, DIM, device=device, dtype=torch.bfloat16),
        table=page_table(requests, p["prefix"], p["own"]),
        chunk=p["chunk"],
    )


@contextmanager
def one_tile() -> Iterator[None]:
    """Wrappers made here choose one tile for each batch."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def run(kv_format: wl.Paged, inputs: Sequence[Shared]) -> list[Thunk]:
    first = inputs[0]
    heads = first.q.shape[1], first.cache.shape[3]
    attention = declared(kv_format, *heads, DIM, first.q.device)
    attention.plan(first.qo_indptr, **first.table)
    return [partial(attention.run, case.q, case.kv) for case in inputs]


def run_one_tile(kv_format: wl.Paged, inputs: Sequence[Shared]) -> list[Thunk]:
    with one_tile():
        return run(kv_format, inputs)


IMPLEMENTATIONS = (
    Implementation("one plan", partial(run, wl.Composed(PAGE))),
    Implementation("one tile", partial(run_one_tile, wl.Composed(PAGE))),
    Implementation("single format", partial(run, wl.Paged(PAGE))),
)


def check_against_float64(inputs: Shared) -> Check:
    """Compares sampled rows of the chunk, and those of the first and last decode."""
    rows, q_heads, dim = inputs.q.shape
    group = q_heads // inputs.cache.shape[3]
    sampled = np.linspace(0, inputs.chunk - 1, SAMPLED_ROWS).astype(int).tolist()
    sampled += [inputs.chunk, rows - 1]
    indptr, indices = inputs.table["kv_indptr"], inputs.table["kv_indices"]

    def truth(row: int) -> torch.Tensor:
        request = max(0, row - inputs.chunk + 1)
        pages = torch.from_numpy(indices[indptr[request] : indptr[request + 1]]).long()
        hidden = max(0, inputs.chunk - 1 - row)  # keys behind the row
        kv = inputs.cache[pages.to(inputs.cache.device)].double()
        k, v = (kv[:, i].flatten(0, 1).repeat_interleave(group, 1) for i in range(2))
        k, v = k[: len(k) - hidden], v[: len(v) - hidden]
        logits = torch.einsum("hd,nhd->hn", inputs.q[row].double(), k) * dim**-0.5
        return torch.einsum("hn,nhd->hd", logits.softmax(-1), v)

    expected = torch.stack([truth(row) for row in sampled])

    def relative_error(output: torch.Tensor) -> float:
        return float((output[sampled].double() - expected).norm() / expected.norm())

    return Check(relative_error, TOLERANCE)


def case_of(chunk: int, decodes: int, prefix: int, heads: tuple[int, int], own: int = OWN) -> Case:
    q_heads, kv_heads = heads
    cache = 4 * (prefix + (decodes + 1) * own) * kv_heads * DIM
    # Pairs of the chunk's rows and what they see; each decode sees all of its own.
    pairs = chunk * (prefix + own) - chunk * (chunk - 1) // 2 + decodes * (prefix + own)
    return Case(
        name=f"{chunk} + {decodes} over {prefix}, {q_heads}/{kv_heads}",
        work=4 * DIM * q_heads * pairs / 1e12,
        unit="TFLOP/s",
        input_bytes=cache,
        params={
            "chunk": chunk, "decodes": decodes, "prefix": prefix, "own": own, "q_heads": q_heads,
            "kv_heads": kv_heads, "head_dim": DIM, "page_size": PAGE, "dtype": "bfloat16",
        },
    )  # fmt: skip


def cases_on(device: torch.device) -> list[Case]:
    """All of them on a GPU; on a CPU, one that is small."""
    if device.type != "cuda":
        return [case_of(40, 4, 256, (4, 2), own=128)]
    return [case_of(*mix, prefix, h) for h in HEADS for prefix in PREFIXES for mix in MIXES]


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    device: torch.device = options.device
    effort = QUICK if options.quick else Effort()
    torch.manual_seed(0)
    report = Report(NAME, device, options.out)
    report.add(copy_ceiling(NAME, device, effort))
    report.add(matmul_ceiling(NAME, device, effort))
    for case in cases_on(device):
        inputs = [make_inputs(case, device) for _ in range(copies_needed(case, device))]
        check = check_against_float64(inputs[0])
        for implementation in chosen(IMPLEMENTATIONS, options.only):
            report.add(time_one(NAME, case, implementation, inputs, check, effort, device))
    report.finish()


if __name__ == "__main__":
    main()
