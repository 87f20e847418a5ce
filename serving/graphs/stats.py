"""What a graph pool has done, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warploom.serving.graphs.pieces import Mode

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class GraphStats:
    """Counts since the pool was made, and bytes now.

    Attributes:
        runs: batches by mode.
        captured: modes and buckets of the captures that are held, the least recently used first.
        captures, evictions, failures: how often a step was captured, a capture given up for others,
            and a step run eagerly since it could not be captured.
        capture_seconds: that all captures took.
        rows, padding_rows: that batches had, and that were added to them.
        shared_bytes: intermediate results of all captures, in one private pool.
        own_bytes: what each capture has of its own, together.
        buffer_bytes: inputs, and what parts of the step give each other.
    """

    runs: Mapping[Mode, int]
    captured: tuple[tuple[Mode, int], ...]
    captures: int
    evictions: int
    failures: int
    capture_seconds: float
    rows: int
    padding_rows: int
    shared_bytes: int
    own_bytes: int
    buffer_bytes: int

    def __rich__(self) -> Table:
        """A table, for `rich.print`."""
        from warploom.tables import in_bytes, new_table

        table = new_table("graph pool", "")
        for mode, runs in self.runs.items():
            table.add_row(f"batches, {mode}", str(runs))
        for name in ("captures", "evictions", "failures", "rows", "padding_rows"):
            table.add_row(name.replace("_", " "), str(getattr(self, name)))
        table.add_row("captured in", f"{self.capture_seconds:.2f} s")
        for name in ("shared_bytes", "own_bytes", "buffer_bytes"):
            table.add_row(name.removesuffix("_bytes"), in_bytes(getattr(self, name)))
        return table
