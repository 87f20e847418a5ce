"""Rounding to storage types, and how much error a computation in them may show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = np.ndarray[Any, Any]

# Allowance beyond the naive twin's error: where it happens to be exact, a kernel need not be.
ATOL = {"float32": 4e-6, "float16": 2e-4, "bfloat16": 2e-3}
# From a number to the next, as a part of the number, at most.
SPACING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def round_bfloat16(x: Floats) -> Floats:
    """To the nearest bfloat16 (ties to even), returned as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    finite = np.isfinite(np.asarray(x, np.float32))
    return np.where(finite, rounded, bits).astype(np.uint32).view(np.float32)


def round_float16(x: Floats) -> Floats:
    """To the nearest float16, returned as float32."""
    return np.asarray(x).astype(np.float16).astype(np.float32)


def round_float32(x: Floats) -> Floats:
    return np.asarray(x).astype(np.float32)


_ROUNDERS: dict[str, Callable[[Floats], Floats]] = {
    "bfloat16": round_bfloat16,
    "float16": round_float16,
    "float32": round_float32,
}


def rounder(dtype: str) -> Callable[[Floats], Floats]:
    """The rounding function of an attention dtype, by name."""
    return _ROUNDERS[dtype]


def tolerance(exact: Floats, naive: Floats, dtype: str, atol: float | None = None) -> float:
    """Largest error a kernel may have: twice that of the naive twin, plus a small allowance.

    Args:
        exact: the oracle's result.
        naive: that of `naive_attention` in the same dtype.
        dtype: storage type of the kernel's operands.
        atol: allowance; by default `ATOL[dtype]`, scaled with the largest exact value above 1.
    """
    exact, naive = np.asarray(exact, np.float64), np.asarray(naive, np.float64)
    finite = np.isfinite(exact)
    size = float(np.max(np.abs(exact[finite]), initial=1.0))
    error = float(np.max(np.abs(naive[finite] - exact[finite]), initial=0.0))
    return 2 * error + (ATOL[dtype] * size if atol is None else atol)


def assert_close(
    got: Any, exact: Floats, naive: Floats, dtype: str, atol: float | None = None
) -> None:
    """Raise AssertionError unless `got` is within `tolerance` of the oracle, infinities equal."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    if got.shape != exact.shape:
        raise AssertionError(f"shape {got.shape}, expected {exact.shape}")
    finite = np.isfinite(exact)
    same = np.where(finite, 0.0, got) == np.where(finite, 0.0, exact)
    error = np.where(finite, np.abs(got - np.where(finite, exact, 0.0)), np.where(same, 0, np.inf))
    bound = tolerance(exact, naive, dtype, atol)
    if not np.all(error <= bound):
        worst = np.unravel_index(int(np.argmax(np.nan_to_num(error, nan=np.inf))), error.shape)
        raise AssertionError(
            f"error {error[worst]:.3g} at {tuple(map(int, worst))} exceeds {bound:.3g}: "
            f"got {got[worst]:.6g}, exact {exact[worst]:.6g}, naive {np.asarray(naive)[worst]:.6g}"
        )
