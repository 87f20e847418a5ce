"""Microseconds that the host spends in one `run`, `attention` or `plan`; no kernel is waited for.

    python benchmarks/run_overhead.py [--device cpu] [--quick] [--out FOLDER]

On a GPU launches are asynchronous and the kernel is tiny, so the loop's time is the host's. On the
CPU the kernel's call is taken out, and what remains is the Python part.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from harness import Report, Row, arguments

import warploom as wl

REQUESTS, KEYS, PAGE = 4, 64, 16
MIXED = (1024, 8192, 32), (1024, 8192, 128), (2048, 16384, 128)  # chunk, context, decodes
SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def microseconds(call: Callable[[], object], device: torch.device, quick: bool) -> list[float]:
    """Host time of one call, for several short loops with an empty queue before each."""
    calls = 200
    for _ in range(20):
        call()
    times = []
    gc.disable()
    for _ in range(10 if quick else 50):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - begin) / calls / 1e3)
    gc.enable()
    return sorted(times)


def planned(device: torch.device, **options: Any) -> tuple[wl.AttentionWrapper, dict[str, Any]]:
    """A small decode batch over a paged cache, its lengths and pages as lists."""
    variant = wl.Causal() & wl.SoftCap(50.0)
    attention = wl.AttentionWrapper(
        variant, kv_format=wl.Paged(PAGE), device=device, **SHAPE, **options
    )
    pages = KEYS // PAGE
    batch: dict[str, Any] = {
        "qo_indptr": list(range(REQUESTS + 1)),
        "kv_indptr": [i * pages for i in range(REQUESTS + 1)],
        "kv_indices": list(range(REQUESTS * pages)),
        "last_page_len": [PAGE] * REQUESTS,
    }
    attention.plan(**batch)
    return attention, batch


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    attention, batch = planned(device)
    arrays: dict[str, Any] = {name: np.array(numbers, np.int32) for name, numbers in batch.items()}
    bounds = wl.Bounds(REQUESTS, REQUESTS, KEYS, max_blocks=REQUESTS * KEYS // PAGE)
    bounded, _ = planned(device, bounds=bounds, cuda_graph=True)
    if device.type == "cpu":
        assert attention._compiled is not None
        attention._compiled.launcher._enqueue = lambda stream: None
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(REQUESTS, 8, 128, **options)
    k, v = torch.randn(2, REQUESTS * KEYS // PAGE, PAGE, 2, 128, **options)
    cache = torch.stack((k, v), dim=1)
    out, lse = torch.empty_like(q), torch.empty(REQUESTS, 8, device=device)
    found: dict[str, Callable[[], object]] = {
        "run": lambda: attention.run(q, (k, v)),
        "run, one cache tensor": lambda: attention.run(q, cache),
        "run, out given": lambda: attention.run(q, (k, v), out=out),
        "run, out and lse given": lambda: attention.run(q, (k, v), out=out, lse=lse),
        "run, return_lse": lambda: attention.run(q, (k, v), return_lse=True),
        "run, a scalar given": lambda: attention.run(q, (k, v), cap=30.0),
        f"plan, {REQUESTS} requests, from Python lists": lambda: attention.plan(**batch),
        f"plan, {REQUESTS} requests, from int32 arrays": lambda: attention.plan(**arrays),
        f"plan with bounds, {REQUESTS} requests, from Python lists": lambda: bounded.plan(**batch),
    }
    if device.type == "cuda":
        found |= dense_calls(q, k, v)
    return found | mixed_plans(device)


def mixed_plans(device: torch.device) -> dict[str, Callable[[], object]]:
    """Plans of a chunk beside decodes, as a server makes one for each step: pages change."""
    found: dict[str, Callable[[], object]] = {}
    for chunk, context, decodes in MIXED:
        attention = wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=32, num_kv_heads=8, head_dim=128,
            dtype="bfloat16", device=device,
        )  # fmt: skip
        rows = torch.tensor([0, chunk] + [1] * decodes).cumsum(0, dtype=torch.int32)
        ends = torch.arange(decodes + 2, dtype=torch.int32) * (context // PAGE)
        last = torch.full((decodes + 1,), PAGE, dtype=torch.int32)
        tables = [torch.randperm(int(ends[-1])).int() for _ in range(2)]
        for where in dict.fromkeys((torch.device("cpu"), device)):
            steps = cycle([(rows, ends, table.to(where), last) for table in tables])
            place = "here" if where.type == "cpu" else "on the device"
            name = f"plan, {chunk} rows and {decodes} decodes over {context} keys, pages {place}"
            found[name] = partial(plan_next, attention, steps)
    return found


def plan_next(attention: wl.AttentionWrapper, steps: Iterator[tuple[torch.Tensor, ...]]) -> None:
    attention.plan(*next(steps))


def dense_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The one-call interface beside torch's, on the same numbers."""
    variant = wl.Causal()
    q = q.view(REQUESTS, 1, 8, 128)
    k, v = (x.view(REQUESTS, KEYS, 2, 128) for x in (k, v))
    q_t, k_t, v_t = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "attention()": lambda: wl.attention(q, k, v, variant=variant),
        "torch sdpa": lambda: sdpa(q_t, k_t, v_t, enable_gqa=True),
    }


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("run_overhead", options.device, options.out)
    with torch.no_grad():
        for name, call in calls(options.device).items():
            times = microseconds(call, options.device, options.quick)
            report.add(
                Row(
                    "run_overhead",
                    name,
                    "host",
                    round(statistics.median(times), 2),
                    "us",
                    ms_low=round(times[len(times) // 10] / 1e3, 5),
                    ms_high=round(times[-1 - len(times) // 10] / 1e3, 5),
                    samples=len(times),
                )
            )
    report.finish()


if __name__ == "__main__":
    main()
