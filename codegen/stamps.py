"""The record in which a kernel tells when a work item ran: NumPy and C from one table."""

from __future__ import annotations

import numpy as np

_FIELDS = (
    ("begin", "nanoseconds, by the clock of the device"),
    ("end", "likewise; 0 until the item is done"),
    ("begin_cycle", "cycles of the multiprocessor; 0 on the CPU"),
    ("end_cycle", "likewise"),
    ("cta", "whose work list has the item"),
    ("sm", "multiprocessor, or thread of the host"),
)
_NAME = "StampRecord"

STAMP_POINTER = f"{_NAME}*"
STAMP = np.dtype([(field, np.int64) for field, _ in _FIELDS])


def stamp_struct() -> str:
    """C++ text of the record."""
    lines = [f"  long long {field};  // {meaning}" for field, meaning in _FIELDS]
    return "\n".join([f"struct {_NAME} {{", *lines, "};"])
