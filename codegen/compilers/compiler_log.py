"""The part of a compiler's log that a person needs."""

from __future__ import annotations

_LINES = 12


def first_errors(log: str) -> str:
    """The log from its first error on, cut after a few lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    cut = lines[first : first + _LINES]
    rest = len(lines) - first - len(cut)
    return "\n".join([*cut, f"... ({rest} more lines)"] if rest > 0 else cut)
