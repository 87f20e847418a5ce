"""The model whose virtual caches are timed, and rows of the host's times.

It has 32 layers of 8 key/value heads of 128 in bf16, stored token by token: a page of 2 MiB holds
16 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import Report, Row

PAGE, MIB = 16, 1 << 20
BY_TOKEN = ("token", "layer", "kv", "head")
MODEL: dict[str, Any] = {
    "num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "order": BY_TOKEN,
    "page_size": 1, "max_requests": 64, "max_tokens": 32_768,
}  # fmt: skip
TOKENS_OF_A_PAGE = 16  # of that model, in 2 MiB


def repeated(call: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each of so many calls."""
    found = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1e3)
    return found


def add(
    report: Report, case: str, impl: str, us: float, times: Sequence[float], params: dict[str, Any]
) -> None:
    """A row of microseconds; the percentiles are those of `times`."""
    low, high = (sorted(times)[i] for i in (len(times) // 10, -1 - len(times) // 10))
    report.add(
        Row(report.benchmark, case, impl, round(us, 3), "us", ms_low=round(low / 1e3, 6),
            ms_high=round(high / 1e3, 6), samples=len(times), params=params)
    )  # fmt: skip
