"""Attention on the CPU: GFLOP/s of warploom, SDPA and compiled FlexAttention, call by call in turn.

    python benchmarks/cpu_attention.py [--quick] [--threads 2] [--out FOLDER]

Implementations take turns within every round, so that what else the machine does at the moment
falls on all of them alike. Only visible pairs of query and key count as work. Each output is
compared with float64 on sampled rows before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.nn.functional as F
from harness import RESULTS, Case, Report, Row
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import warploom as wl

CPU = torch.device("cpu")
CAP = 20.0
SAMPLED_ROWS = 32
PAUSE = 0.02  # seconds before a call, in which OpenMP's threads of the call before stop spinning
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, against float64

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """One computation; queries are the last rows of the sequence, the mask is causal."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    soft_cap: bool = False

    @property
    def pairs(self) -> int:
        """Visible pairs of query and key."""
        first = self.kv_len - self.q_len
        per_head = sum(range(first + 1, self.kv_len + 1))
        return self.batch * self.q_heads * per_head

    def case(self) -> Case:
        shape = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "dim", "soft_cap")
        params = {name: getattr(self, name) for name in shape}
        params["dtype"] = str(self.dtype).removeprefix("torch.")
        return Case(self.name, 4 * self.dim * self.pairs / 1e9, "GFLOP/s", 0, params)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as [batch, heads, length, dim]."""
        torch.manual_seed(0)
        lengths = ((self.q_heads, self.q_len), (self.kv_heads, self.kv_len))
        q, k, v = (
            torch.randn(self.batch, heads, length, self.dim, dtype=self.dtype)
            for heads, length in (*lengths, lengths[1])
        )
        return q, k, v


PROBLEMS = (
    Problem("causal bf16 2k", 1, 8, 8, 2048, 2048),
    Problem("causal fp32 2k", 1, 8, 8, 2048, 2048, dtype=torch.float32),
    Problem("causal bf16 8k", 1, 4, 4, 8192, 8192),
    Problem("soft-cap causal bf16 2k", 1, 8, 8, 2048, 2048, soft_cap=True),
    Problem("chunk of 256 after 3840", 1, 8, 2, 256, 4096),
    Problem("decode 8 x 4096", 8, 32, 8, 1, 4096),
)


def warploom_call(problem: Problem, q: Any, k: Any, v: Any) -> Call:
    variant = wl.Causal() & wl.SoftCap(CAP) if problem.soft_cap else wl.Causal()
    attention = wl.AttentionWrapper(
        variant,
        kv_format=wl.Dense(layout="HND"),
        num_q_heads=problem.q_heads,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.dim,
        dtype=problem.dtype,
        device=CPU,
    )
    requests = torch.arange(problem.batch + 1, dtype=torch.int32)
    attention.plan(requests * problem.q_len, requests * problem.kv_len)
    return lambda: attention.run(q, (k, v))


def sdpa_call(problem: Problem, q: Any, k: Any, v: Any) -> Call:
    if problem.soft_cap:
        raise NotImplementedError("SDPA has no soft-cap")
    options: dict[str, Any] = {"enable_gqa": problem.q_heads != problem.kv_heads}
    if problem.q_len == problem.kv_len:
        options["is_causal"] = True
    elif problem.q_len > 1:
        last = torch.arange(problem.kv_len - problem.q_len, problem.kv_len)[:, None]
        options["attn_mask"] = torch.arange(problem.kv_len)[None] <= last
    return partial(F.scaled_dot_product_attention, q, k, v, **options)


def flex_call(problem: Problem, q: Any, k: Any, v: Any) -> Call:
    torch._dynamo.reset()
    offset = problem.kv_len - problem.q_len

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + offset

    def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    options: dict[str, Any] = {"enable_gqa": problem.q_heads != problem.kv_heads}
    if problem.q_len > 1:
        lengths = (problem.q_len, problem.kv_len)
        options["block_mask"] = create_block_mask(mask, None, None, *lengths, device="cpu")
    if problem.soft_cap:
        options["score_mod"] = soft_cap
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, q, k, v, **options)


CALLS: Mapping[str, Callable[..., Call]] = {
    "warploom": warploom_call,
    "sdpa": sdpa_call,
    "FlexAttention": flex_call,
}


def truth(problem: Problem, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled rows, and the exact output there for the first and last query head."""
    rows = torch.linspace(0, problem.q_len - 1, min(SAMPLED_ROWS, problem.q_len)).long()
    last_seen = rows + problem.kv_len - problem.q_len
    hidden = torch.arange(problem.kv_len)[None] > last_seen[:, None]
    exact = []
    for q_head, kv_head in ((0, 0), (-1, -1)):
        logits = q[-1, q_head, rows].double() @ k[-1, kv_head].double().T * problem.dim**-0.5
        logits = CAP * torch.tanh(logits / CAP) if problem.soft_cap else logits
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        exact.append(weights @ v[-1, kv_head].double())
    return rows, torch.stack(exact)


def relative_error(output: torch.Tensor, rows: torch.Tensor, exact: torch.Tensor) -> float:
    got = output[-1, [0, -1]][:, rows].double()
    return float((got - exact).norm() / exact.norm())


def measure(problem: Problem, rounds: int) -> list[Row]:
    """A row for each implementation: checked, then timed in turn with the others."""
    case, tensors = problem.case(), problem.tensors()
    rows, exact = truth(problem, *tensors)
    blank = partial(Row, "cpu_attention", case.name, unit=case.unit, params=case.params)
    found, calls, errors = [], {}, {}
    for name, make in CALLS.items():
        try:
            call = make(problem, *tensors)
            errors[name] = relative_error(call(), rows, exact)
        except Exception as failure:  # a peer's failure must not end the run: it is the figure
            first = (str(failure).strip().splitlines() or [""])[0]
            found.append(blank(name, None, note=f"n/a: {first}"[:200]))
            continue
        if errors[name] <= TOLERANCE[problem.dtype]:
            calls[name] = call
        else:
            found.append(blank(name, None, error=errors[name], note="wrong: relative error"))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for warm in range(-1, rounds):
        for name, call in calls.items():
            sleep(PAUSE)
            begin = perf_counter()
            call()
            if warm >= 0:
                times[name].append((perf_counter() - begin) * 1e3)
    for name, taken in times.items():
        taken.sort()
        median = statistics.median(taken)
        value = round(case.work / (median * 1e-3), 1)
        low, high = taken[len(taken) // 10], taken[-1 - len(taken) // 10]
        found.append(
            blank(name, value, ms=round(median, 4), ms_low=round(low, 4), ms_high=round(high, 4),
                  samples=rounds, error=float(f"{errors[name]:.3g}"))
        )  # fmt: skip
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first case only, fewer rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads of every implementation")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    os.environ["WARPLOOM_THREADS"] = str(options.threads)
    report = Report("cpu_attention", CPU, options.out)
    report.facts |= {"device": cpu_name(), "threads": options.threads}
    with torch.inference_mode():
        for problem in PROBLEMS[:1] if options.quick else PROBLEMS:
            for row in measure(problem, rounds=5 if options.quick else 21):
                report.add(row)
    report.finish()


if __name__ == "__main__":
    main()
