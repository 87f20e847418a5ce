"""Virtual caches beside paged ones: what growth costs, attention, and memory that changes hands.

    python benchmarks/virtual_cache.py [--device cpu] [--quick] [--tables growth attention handover]

Growth (`virtual_growth.py`) and handover are times of the host, in which the device is idle.
Attention is timed as everywhere, over one layer of a cache, with outputs compared
with float64.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from batches import Inputs, Shape, Truth, lengths, make_inputs
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Implementation,
    Report,
    Row,
    Thunk,
    arguments,
    time_one,
)
from virtual_growth import growth
from virtual_model import BY_TOKEN, MIB, MODEL, PAGE, TOKENS_OF_A_PAGE, add, repeated

import warploom as wl


def handover(report: Report, device: torch.device, quick: bool) -> None:
    most = 16 if quick else 128
    small = {**MODEL, "max_requests": 1}
    with (
        wl.MemoryPool(most * 2 * MIB, device) as pool,
        wl.VirtualCache(pool, **small) as first,
        wl.VirtualCache(pool, **small) as second,
    ):

        def ready(cache: wl.VirtualCache, tokens: int) -> tuple[float, int]:
            """Microseconds until a new request has memory, and pages mapped for it."""
            synchronize(device)
            before, begin = pool.stats().maps, time.perf_counter_ns()
            cache.reserve("request", tokens)
            cache.grow("request", tokens)
            us = (time.perf_counter_ns() - begin) / 1e3
            cache.release("request")
            return us, pool.stats().maps - before

        for pages in (1, 16) if quick else (1, 16, 128):
            tokens = pages * TOKENS_OF_A_PAGE
            ways = defaultdict[str, list[tuple[float, int]]](list)
            for turn in range(5 if quick else 21):
                ready(first, tokens)
                if turn:
                    ways["own next request"].append(ready(first, tokens))
                ready(first, most * TOKENS_OF_A_PAGE)  # no page is free, so that first must give
                ways["another model's request"].append(ready(second, tokens))
                pool.trim()
                ways["free pages"].append(ready(second, tokens))
                pool.trim()
            source = torch.empty(pages * 2 * MIB, dtype=torch.uint8, device=device)
            target = torch.zeros_like(source)
            ways["a copy of as many bytes"] = [(us, 0) for us in copies(source, target, 21)]
            for way, found in ways.items():
                times = [us for us, _ in found]
                params = {"pages": pages, "page_bytes": pool.page_bytes, "maps": found[-1][1]}
                case = f"{pages} pages, {pages * 2} MiB"
                add(report, case, way, statistics.median(times), times, params)


def copies(source: torch.Tensor, target: torch.Tensor, times: int) -> list[float]:
    def copy() -> None:
        target.copy_(source)
        synchronize(source.device)

    return repeated(copy, times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wrapper(shape: Shape, kv_format: Any, device: torch.device) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal(), kv_format=kv_format, num_q_heads=shape.q_heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.dim, dtype=shape.dtype, device=device,
    )  # fmt: skip


def paged_calls(inputs: Sequence[Inputs]) -> Iterator[Thunk]:
    for one in inputs:
        attention = wrapper(one.shape, wl.Paged(PAGE), one.q.device)
        attention.plan(
            one.qo_indptr, one.kv_indptr, kv_indices=one.indices, last_page_len=one.last_page_len
        )
        yield partial(attention.run, one.q, (one.k, one.v))


def ragged_calls(inputs: Sequence[Inputs]) -> Iterator[Thunk]:
    for one in inputs:
        attention = wrapper(one.shape, wl.Ragged(), one.q.device)
        k, v = (
            torch.cat([one.stored(x, i) for i in range(one.shape.batch)]) for x in (one.k, one.v)
        )
        attention.plan(one.qo_indptr, [0, *torch.tensor(one.shape.kv_lens).cumsum(0).tolist()])
        yield partial(attention.run, one.q, (k, v))


def virtual_calls(
    inputs: Sequence[Inputs], stack: ExitStack, num_layers: int = 1, **storage: Any
) -> Iterator[Thunk]:
    """Each request's keys in a cache, grown in turn with the others so that pages are scattered."""
    for one in inputs:
        shape, device = one.shape, one.q.device
        bytes_of_all = shape.bytes * num_layers + shape.batch * num_layers * 16 * MIB
        pool = stack.enter_context(wl.MemoryPool(bytes_of_all, device, preallocate=False))
        cache = stack.enter_context(
            wl.VirtualCache(
                pool, num_layers=num_layers, max_requests=shape.batch, max_tokens=32_768,
                num_kv_heads=shape.kv_heads, head_dim=shape.dim, dtype=shape.dtype, **storage,
            )
        )  # fmt: skip
        order = random.Random(0).sample(range(shape.batch), shape.batch)
        for request in order:
            cache.reserve(request)
        for part in range(1, 9):
            for request in order:
                cache.grow(request, shape.kv_lens[request] * part // 8)
        for request in order:
            k, v = cache.view(request, num_layers // 2)
            k.copy_(one.stored(one.k, request))
            v.copy_(one.stored(one.v, request))
        attention = wrapper(shape, cache.kv_format, device)
        attention.plan(one.qo_indptr, **cache.tables(range(shape.batch)))
        yield partial(attention.run, one.q, cache.kv(num_layers // 2))


def attention(report: Report, device: torch.device, quick: bool) -> None:
    on_gpu = device.type == "cuda"
    heads, layers = ((32, 8), 32) if on_gpu else ((8, 2), 8)
    sizes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    if on_gpu:
        sizes = [
            ("decode, 64 x 1k", (1,) * 64, (1024,) * 64),
            ("decode, 64 of zipf, mean 1k", (1,) * 64, lengths("zipf", 64, 1024)),
            ("decode, 16 x 8k", (1,) * 16, (8192,) * 16),
            ("causal prefill, 16 x 1k", (1024,) * 16, (1024,) * 16),
        ]
    else:
        sizes = [
            ("decode, 8 x 2k", (1,) * 8, (2048,) * 8),
            ("prefill, 2 x 512", (512,) * 2, (512,) * 2),
        ]
    for name, q_lens, kv_lens in sizes[:1] if quick else sizes:
        shape = Shape(q_lens, kv_lens, *heads, 128, torch.bfloat16, PAGE)
        work, unit = shape.flops() / 1e12, "TFLOP/s"
        if max(q_lens) == 1:
            work, unit = shape.bytes / 1e9, "GB/s"
        elif not on_gpu:
            work, unit = shape.flops() / 1e9, "GFLOP/s"
        case = Case(name, work, unit, shape.bytes, shape.describe())
        inputs = [make_inputs(shape, device) for _ in range(4 if on_gpu else 1)]
        check = Truth().check(inputs[0])
        with ExitStack() as stack:
            virtual = partial(virtual_calls, stack=stack)
            ways: dict[str, Callable[..., Iterator[Thunk]]] = {
                "paged": paged_calls,
                "ragged": ragged_calls,
                "virtual": virtual,
                "virtual, as pages": partial(virtual, page_size=PAGE),
                "virtual, by token": partial(virtual, num_layers=layers, order=BY_TOKEN),
            }
            if not on_gpu:
                calls = {way: next(make(inputs)) for way, make in ways.items()}
                in_turn(report, case, calls, check, rounds=5 if quick else 101)
                continue
            for way, make in ways.items():
                one = Implementation(way, lambda given, make=make: list(make(given)))
                effort = QUICK if quick else Effort()
                report.add(time_one(report.benchmark, case, one, inputs, check, effort, device))


def in_turn(report: Report, case: Case, calls: dict[str, Thunk], check: Check, rounds: int) -> None:
    """Time calls on the CPU in turn, so that what else it does falls on all of them alike."""
    errors = {way: check.relative_error(call()) for way, call in calls.items()}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(rounds):
        for way, call in calls.items():
            times[way] += repeated(call, 1)
    for way, taken in times.items():
        taken.sort()
        low, median, high = (taken[len(taken) * part // 10] / 1e3 for part in (1, 5, 9))
        is_right = errors[way] <= check.tolerance
        value = round(case.work / median * 1e3, 2) if is_right else None
        report.add(
            Row(report.benchmark, case.name, way, value, case.unit, ms=round(median, 4),
                ms_low=round(low, 4), ms_high=round(high, 4), samples=rounds,
                error=float(f"{errors[way]:.3g}"), params=case.params,
                note="" if is_right else "wrong: relative error")
        )  # fmt: skip


TABLES: dict[str, Callable[[Report, torch.device, bool], None]] = {
    "growth": growth,
    "attention": attention,
    "handover": handover,
}


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv, tuple(TABLES))
    for name in options.tables:
        twin = "_cpu" if options.device.type == "cpu" else ""
        report = Report(f"virtual_{name}{twin}", options.device, options.out)
        if twin:
            from cpu_attention import cpu_name

            report.facts["device"] = f"CPU twin on {cpu_name()}"
        with torch.inference_mode():
            TABLES[name](report, options.device, options.quick)
        report.finish()


if __name__ == "__main__":
    main()
