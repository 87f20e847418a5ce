"""GPUs whose prefetches were timed: what `benchmarks/fit_prefetch.py` found in recorded rows."""

from __future__ import annotations

from dataclasses import replace

from warploom.serving.prefetch.overlap import Overlap

# CUDA 13.0, torch 2.11, 1980 MHz, 2026-11-26: eight readers behind 5 to 40 us of a stand-in for a
# collective that holds 16 SMs. Fitted to half of the cases of each file; the errors are those of
# the others. Rounded to four digits. `kept` is half of L2, and not fitted.
H100_OVERLAP = Overlap(  # H100 80GB HBM3, benchmarks/results/prefetch_h100.jsonl
    bandwidth=3.058e12, startup=1.675e-6, rate=272.3e9, kept=25e6, hit_rate=4.568e12,
    fixed=-0.05065e-6, error=0.7760e-6, own_error=0.6441e-6,
)  # fmt: skip
H200_OVERLAP = Overlap(  # benchmarks/results/prefetch.jsonl
    bandwidth=4.380e12, startup=0.8856e-6, rate=230.2e9, kept=30e6, hit_rate=5.291e12,
    fixed=0.2482e-6, error=0.5404e-6, own_error=0.3852e-6,
)  # fmt: skip

# Beside all-reduces of NCCL over NVLink, in CUDA graphs on two and four H100 (2026-11-27): the
# median of `fixed_costs` in benchmarks/tensor_parallel.py, and how far single steps are off it.
# More than a full L2 can save, so that no budget is ever chosen.
H100_NCCL_OVERLAP = replace(H100_OVERLAP, fixed=3.957e-6, error=1.127e-6, own_error=1.127e-6)
