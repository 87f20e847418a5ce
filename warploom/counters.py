"""What this process has compiled, found in caches, planned and copied, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from warploom import forks


@dataclass(frozen=True)
class Stats:
    """Counts of this process since it began, or since `reset_stats()`.

    Runs are not among them: counting would cost more than the rest of what a run does for itself.

    Attributes:
        compiles: kernels and native planners that a compiler was asked for, and made.
        compile_seconds: what that took, added up over threads.
        memory_hits: those that were wanted and that the process had already.
        disk_hits: those that the cache folder had.
        misses: those that neither had; compiled then, or refused, or wrong.
        plans: batches planned, by the host or by a device.
        copies: tensors that a call copied, since a kernel could not reach them.
        traces: variants whose functors `attention` traced, as it does where nothing tells whether
            what they read has changed.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    plans: int = 0
    copies: int = 0
    traces: int = 0


_NAMES = tuple(field.name for field in fields(Stats))
_counts: dict[str, float] = {}
_lock = forks.lock()


def count(name: str, more: float = 1) -> None:
    """Add to a number of `Stats`; any thread may."""
    with _lock:
        _counts[name] = _counts.get(name, 0) + more


def stats() -> Stats:
    """What this process has done until now; a later call gives another record."""
    with _lock:
        return _taken()


def reset_stats() -> Stats:
    """Begin again at 0; returns the counts until now, of which none is lost in between."""
    with _lock:
        found = _taken()
        _counts.clear()
        return found


def _taken() -> Stats:
    return Stats(**{name: _counts[name] for name in _NAMES if name in _counts})  # type: ignore[arg-type]
