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
    Thunk,
    arguments,
    chosen,
    copies_needed,
    report_with_ceilings,
    time_one,
)
from shared_prefix import DIM, PAGE, Shared, check_rows, declared, page_table

import warploom as wl

NAME, OWN, SAMPLED_ROWS = "shared_mixed", 4096, 16
SWITCH = "WARPLOOM_MIXED_ROLES"
HEADS, PREFIXES = ((32, 8), (32, 32)), (1024, 4096)
MIXES = ((1024, 32), (1024, 64), (2048, 64), (512, 128))  # rows of the chunk, decodes


@dataclass(frozen=True)
class Mixed(Shared):
    """Queries are [rows, q heads, dim], the chunk's first."""

    chunk: int

    @property
    def qo_indptr(self) -> np.ndarray[Any, Any]:
        return np.append(0, np.arange(self.chunk, len(self.q) + 1))


def make_inputs(case: Case, device: torch.device) -> Mixed:
    p = case.params
    requests = p["decodes"] + 1
    pages = (p["prefix"] + requests * p["own"]) // PAGE
    q, cache = (p["chunk"] + p["decodes"], p["q_heads"]), (pages, 2, PAGE, p["kv_heads"])
    return Mixed(
        q=torch.randn(*q, DIM, device=device, dtype=torch.bfloat16),
        cache=torch.randn(*cache, DIM, device=device, dtype=torch.bfloat16),
        table=page_table(requests, p["prefix"], p["own"]),
        prefix=p["prefix"],
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


def run(kv_format: wl.Paged, inputs: Sequence[Mixed]) -> list[Thunk]:
    first = inputs[0]
    heads = first.q.shape[1], first.cache.shape[3]
    attention = declared(kv_format, *heads, DIM, first.q.device)
    attention.plan(first.qo_indptr, **first.table)
    return [partial(attention.run, case.q, case.kv) for case in inputs]


def run_one_tile(kv_format: wl.Paged, inputs: Sequence[Mixed]) -> list[Thunk]:
    with one_tile():
        return run(kv_format, inputs)


IMPLEMENTATIONS = (
    Implementation("one plan", partial(run, wl.Composed(PAGE))),
    Implementation("one tile", partial(run_one_tile, wl.Composed(PAGE))),
    Implementation("single format", partial(run, wl.Paged(PAGE))),
)


def check_against_float64(inputs: Mixed) -> Check:
    """Compares sampled rows of the chunk, and those of the first and last decode."""
    rows, chunk = len(inputs.q), inputs.chunk
    of_chunk = np.linspace(0, chunk - 1, SAMPLED_ROWS).astype(int).tolist()
    sampled = [(row, 0, chunk - 1 - row) for row in of_chunk]
    return check_rows(inputs, [*sampled, (chunk, 1, 0), (rows - 1, rows - chunk, 0)])


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
    report = report_with_ceilings(NAME, options)
    for case in cases_on(device):
        inputs = [make_inputs(case, device) for _ in range(copies_needed(case, device))]
        check = check_against_float64(inputs[0])
        for implementation in chosen(IMPLEMENTATIONS, options.only):
            report.add(time_one(NAME, case, implementation, inputs, check, effort, device))
    report.finish()


if __name__ == "__main__":
    main()
