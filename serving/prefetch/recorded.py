"""GPUs whose prefetches were timed: what `benchmarks/fit_prefetch.py` found in recorded rows."""

from __future__ import annotations

from warploom.serving.prefetch.overlap import Overlap

# CUDA 13.0, torch 2.11, 1980 MHz, 2026-11-26: eight readers behind 5 to 40 us of a stand-in for a
# collective that holds 16 SMs. Fitted to half of the cases of each file; `error` is that of the
# others. Rounded to four digits. A startup of 0 is the least that is tried, so what comes late is
# in `rate` and `fork`.
H100_OVERLAP = Overlap(  # H100 80GB HBM3, benchmarks/results/prefetch_h100.jsonl
    bandwidth=3.058e12, startup=0.0, rate=191.1e9, kept=28e6, gain=0.4300, late=0.5745,
    fork=0.04166e-6, error=0.8984e-6,
)  # fmt: skip
H200_OVERLAP = Overlap(  # benchmarks/results/prefetch.jsonl
    bandwidth=4.380e12, startup=0.0, rate=193.6e9, kept=32e6, gain=0.2914, late=0.7953,
    fork=0.5723e-6, error=0.6038e-6,
)  # fmt: skip
