"""GPUs whose prefetches were timed: what `benchmarks/fit_prefetch.py` found in recorded rows."""

from __future__ import annotations

from warploom.serving.prefetch.overlap import Overlap

# One NVIDIA H100 80GB HBM3 (1980 MHz), CUDA 13.0, torch 2.11, 2026-11-26: eight readers behind 5 to
# 40 us of a stand-in for a collective that holds 16 SMs, benchmarks/results/prefetch.jsonl. Fitted
# to half of its cases; `error` is that of the others. Rounded to four digits. A startup of 0 is
# the least that is tried, so what comes late is in `rate` and `fork`.
H100_OVERLAP = Overlap(
    bandwidth=3.058e12, startup=0.0, rate=191.1e9, kept=32e6, gain=0.4647, late=1.031,
    fork=0.4016e-6, error=0.9282e-6,
)  # fmt: skip
