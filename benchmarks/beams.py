"""A step of beam search: attention, the choice of beams, and what the host does in between.

    python benchmarks/beams.py [--quick] [--device cpu] [--tables attention top_k host]

Beams of 32 to 512 share a prefix of 1k to 8k tokens and have two of their own, as at the last token
of an item of three. Both formats take the same page tables and caches, bf16 in pages of 16; "pages
of 1" lists the same tokens one by one, with which no page is ever copied. The choice is that of the
best `beams` among as many candidates of each beam. All figures are microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from copy import copy
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
    NotAvailable,
    Report,
    Row,
    Thunk,
    arguments,
    chosen,
    copies_needed,
    time_one,
)
from pictures import picture
from shared_prefix import DIM, PAGE, TOLERANCE, Shared, planned

import warploom as wl
from warploom.recommendation import BeamPages, TopK, heap_top_k, sorted_top_k
from warploom.scheduler.composed.prefixes import find_prefixes

BEAMS, PREFIXES, HEADS, STEPS, VOCAB = (32, 128, 512), (1024, 4096, 8192), (32, 8), 2, 8192
MOST_TOKENS = 1 << 19  # that pages of one token list; planning more takes seconds


def beam_pages(beams: int, prefix: int, page: int, steps: int = STEPS) -> BeamPages:
    """Beams after so many steps, each of which continued every beam once or not at all."""
    rng = np.random.default_rng(0)
    prefix_pages = prefix // page
    own = prefix_pages + np.arange(BeamPages.pages_needed(beams, steps + 1, prefix, page))
    pages = BeamPages(np.arange(prefix_pages), prefix, own, page_size=page, width=beams)
    for step in range(steps):
        pages.advance(rng.integers(0, len(pages), beams) if step else np.zeros(beams, int))
    return pages


def make_inputs(case: Case, device: torch.device) -> Shared:
    beams, prefix = case.params["beams"], case.params["prefix"]
    table = beam_pages(beams, prefix, PAGE).tables()
    heads, kv_heads = case.params["heads"]
    pages = prefix // PAGE + beams
    shape = (pages, 2, PAGE, kv_heads, DIM)
    return Shared(
        q=torch.randn(beams, heads, DIM, device=device, dtype=torch.bfloat16),
        cache=torch.randn(shape, device=device, dtype=torch.bfloat16),
        table=table,
        prefix=prefix,
    )


def listed_tokens(inputs: Shared) -> torch.Tensor:
    """[beams, tokens] int64: where each beam's tokens lie, counted in tokens."""
    pages = torch.from_numpy(inputs.table["kv_indices"]).long().view(len(inputs.q), -1, 1)
    tokens = (pages * PAGE + torch.arange(PAGE)).flatten(1)
    return tokens[:, : inputs.prefix + STEPS]


def in_pages(kv_format: wl.Paged, inputs: Sequence[Shared]) -> list[Thunk]:
    attention = planned(kv_format, inputs[0])
    return [partial(attention.run, one.q, one.kv) for one in inputs]


def by_token(inputs: Sequence[Shared]) -> list[Thunk]:
    tokens = listed_tokens(inputs[0])
    if tokens.numel() > MOST_TOKENS:
        raise NotAvailable(f"the table has {tokens.numel()} entries")
    beams, length = tokens.shape
    table = {
        "kv_indptr": np.arange(beams + 1, dtype=np.int32) * np.int32(length),
        "kv_indices": tokens.ravel().numpy().astype(np.int32),
        "last_page_len": np.ones(beams, np.int32),
    }
    first = inputs[0]
    attention = planned(wl.Composed(1), Shared(first.q, first.cache, table, first.prefix))
    return [
        partial(attention.run, one.q, tuple(x.flatten(0, 1).unsqueeze(1) for x in one.kv))
        for one in inputs
    ]


FORMATS = (
    Implementation("warploom", partial(in_pages, wl.Composed(PAGE))),
    Implementation("single format", partial(in_pages, wl.Paged(PAGE))),
    Implementation("pages of 1", by_token),
)


def against_float64(inputs: Shared) -> Check:
    """Compares all heads of the first, middle and last beam."""
    some = sorted({0, len(inputs.q) // 2, len(inputs.q) - 1})
    tokens = listed_tokens(inputs).to(inputs.q.device)
    group = inputs.q.shape[1] // inputs.cache.shape[3]
    expected = []
    for beam in some:
        k, v = (
            x.flatten(0, 1)[tokens[beam]].double().repeat_interleave(group, 1) for x in inputs.kv
        )
        logits = torch.einsum("hd,nhd->hn", inputs.q[beam].double(), k) * DIM**-0.5
        expected.append(torch.einsum("hn,nhd->hd", logits.softmax(-1), v))
    truth = torch.stack(expected)
    return Check(lambda out: float((out[some].double() - truth).norm() / truth.norm()), TOLERANCE)


def attention(report: Report, device: torch.device, quick: bool, only: str) -> None:
    on_gpu = device.type == "cuda"
    heads = HEADS if on_gpu else (4, 2)
    sizes = [(b, p) for p in PREFIXES for b in BEAMS] if on_gpu else [(8, 256), (32, 256)]
    for beams, prefix in sizes[:2] if quick else sizes:
        cache = 4 * (prefix + beams * STEPS) * heads[1] * DIM
        params = {
            "beams": beams, "prefix": prefix, "heads": heads, "head_dim": DIM, "page_size": PAGE,
            "own_tokens": STEPS, "dtype": "bfloat16",
        }  # fmt: skip
        case = Case(f"{beams} beams, {prefix}", cache / 1e9, "us", cache, params)
        inputs = [make_inputs(case, device) for _ in range(copies_needed(case, device))]
        check, effort = against_float64(inputs[0]), QUICK if quick else Effort()
        for one in chosen(FORMATS, only):
            report.add(time_one(report.benchmark, case, one, inputs, check, effort, device))


def candidates(beams: int) -> np.ndarray[Any, Any]:
    """[beams, beams] float64: the best of random logits, beside scores of the beams."""
    made = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(beams, VOCAB, generator=made)
    scores = -8 + 2 * torch.randn(beams, 1, generator=made).double()
    return (scores + logits.log_softmax(1).topk(beams, 1).values.double()).numpy()


def full_sort(scores: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    flat = scores.ravel()
    return flat[np.argsort(-flat, kind="stable")[:count]]


def best_by(
    select: Callable[..., TopK], scores: np.ndarray[Any, Any], count: int
) -> np.ndarray[Any, Any]:
    return select(scores, count, assume_sorted=True).scores


def best_on_device(scores: torch.Tensor, count: int) -> np.ndarray[Any, Any]:
    best: np.ndarray[Any, Any] = scores.view(-1).topk(count).values.cpu().numpy()
    return best


def top_k(report: Report, device: torch.device, quick: bool, only: str) -> None:
    """The choice on the host, and one on the device whose result comes to the host."""
    for beams in (32, 64) if quick else (32, 64, 128, 256, 512):
        scores = candidates(beams)
        on_device, expected = torch.from_numpy(scores).to(device), full_sort(scores, beams)
        ways: dict[str, Callable[[], Any]] = {
            "warploom": partial(best_by, sorted_top_k, scores, beams),
            "heap": partial(best_by, heap_top_k, scores, beams),
            "full sort": partial(full_sort, scores, beams),
            "torch.topk": partial(best_on_device, on_device, beams),
        }
        seen = {
            "warploom": sorted_top_k(scores, beams).seen,
            "heap": heap_top_k(scores, beams).seen,
        }
        for way, call in ways.items():
            if not only or way in only.split(","):
                params = {"beams": beams, "candidates": scores.size}
                params["seen"] = seen.get(way, scores.size)
                right = np.array_equal(call(), expected)
                note = "" if right else "wrong: not those of a full sort"
                add(report, f"{beams} x {beams}", way, call, quick, params, note)


def host(report: Report, device: torch.device, quick: bool, only: str) -> None:
    """Reordering, and plans of both formats, for page tables of the longest prefix.

    What a composed plan takes to find the prefix stands alone, too: declared, it would be saved.
    """
    prefix = 1024 if quick else max(PREFIXES)
    heads = HEADS if device.type == "cuda" else (4, 2)
    for beams in BEAMS[:1] if quick else BEAMS:
        pages = beam_pages(beams, prefix, PAGE, steps=1)
        parents = np.random.default_rng(1).integers(0, beams, beams)

        def reorder(pages: BeamPages = pages, parents: Any = parents) -> BeamPages:
            again = copy(pages)  # the same step each time
            again.advance(parents)
            return again

        pages = reorder()
        table, indptr = pages.tables(), list(range(beams + 1))
        ways: dict[str, Callable[[], Any]] = {"reorder": reorder, "page tables": pages.tables}
        for way, kv_format in {"plan": wl.Composed(PAGE), "plan, single": wl.Paged(PAGE)}.items():
            wrapper = wl.AttentionWrapper(
                wl.Causal(), kv_format=kv_format, num_q_heads=heads[0], num_kv_heads=heads[1],
                head_dim=DIM, dtype=torch.bfloat16, device=device,
            )  # fmt: skip
            ways[way] = partial(wrapper.plan, indptr, **table)
        starts = table["kv_indptr"][:-1].astype(np.int64)
        full = np.full(beams, pages.length // PAGE)
        ways["finding prefixes"] = partial(find_prefixes, starts, table["kv_indices"], full, PAGE)
        params = {"beams": beams, "prefix": prefix, "page_size": PAGE}
        for way, call in ways.items():
            if not only or way in only.split(","):
                add(report, f"{beams} beams, {prefix}", way, call, quick, params)


def add(
    report: Report, case: str, way: str, call: Callable[[], Any], quick: bool,
    params: dict[str, Any], note: str = "",
) -> None:  # fmt: skip
    """A row: the median of calls, or why there is none."""
    call()
    times: list[float] = []
    end = time.perf_counter() + (0.05 if quick else 0.3)
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 300):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    times.sort()
    median = statistics.median(times)
    report.add(
        Row(report.benchmark, case, way, None if note else round(median, 2), "us",
            ms=round(median / 1e3, 5), ms_low=round(times[len(times) // 10] / 1e3, 5),
            ms_high=round(times[-1 - len(times) // 10] / 1e3, 5), samples=len(times),
            params=params, note=note)
    )  # fmt: skip


TABLES = {"attention": attention, "top_k": top_k, "host": host}


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, tuple(TABLES))
    torch.manual_seed(0)
    for name in options.tables:
        report = Report(f"beams_{name}", options.device, options.out)
        with torch.inference_mode():
            TABLES[name](report, options.device, options.quick, options.only)
        report.finish()
        picture(report, options.out)


if __name__ == "__main__":
    main()
