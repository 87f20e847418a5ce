"""Which mode a batch is served in, and at how many rows: a function of its size alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.graph_errors import NoSuchMode
from warploom.serving.graphs.buckets import Buckets
from warploom.serving.graphs.pieces import MODES, Mode, Step


@dataclass(frozen=True)
class Choice:
    """How a batch is served.

    Attributes:
        mode: "full", one launch; "partial", a launch for each part that only rows shape, and the
            rest eagerly; or "eager".
        padded_rows: rows that the step sees: the bucket, or, eagerly, those of the batch.
        reason: what kept the modes with fewer launches from it.
    """

    mode: Mode
    padded_rows: int
    reason: str


class Chooser:
    """The first of `MODES` that serves a batch.

    Attributes:
        refused: modes and buckets that could not be captured, and why.
    """

    def __init__(self, step: Step, buckets: Buckets, most: Mapping[Mode, int]) -> None:
        """For a step; `most` has the rows up to which each mode is wanted."""
        self._step, self._buckets, self._most = step, buckets, most
        self.refused: dict[tuple[Mode, int], str] = {}

    def choose(self, rows: int, wanted: str | None = None) -> Choice:
        """What serves so many rows; raises NoSuchMode if `wanted` does not."""
        if wanted is not None and wanted not in MODES:
            known = f"there are {', '.join(MODES)}"
            raise NoSuchMode(mode=wanted, rows=rows, reason=known)
        against: list[str] = []
        for mode in MODES:
            reason = self._why_not(mode, rows, wanted is not None)
            if wanted == mode and reason:
                raise NoSuchMode(mode=mode, rows=rows, reason=reason)
            if wanted == mode or (wanted is None and reason is None):
                bucket = None if mode == "eager" else self._buckets.of(rows)
                return Choice(mode, bucket or rows, "; ".join(against) or "the fewest launches")
            against.append(f"{mode}: {reason}")
        raise AssertionError("eager serves everything")

    def _why_not(self, mode: Mode, rows: int, asked: bool) -> str | None:
        """What keeps a mode from a batch; limits are a wish, which a caller's word overrides."""
        if mode == "eager":
            return None
        bucket = self._buckets.of(rows)
        if bucket is None:
            return f"the largest bucket has {self._buckets.sizes[-1]} rows"
        if not asked and rows > self._most[mode]:
            return f"{mode}_rows is {self._most[mode]}"
        return self._step.why_not(mode) or self.refused.get((mode, bucket))
