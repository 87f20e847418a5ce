"""Batches, masks and cases that the scheduler's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support import plan_text, plan_text_stream_k
from support.problems import plan_of, problem_of

from warploom.scheduler.model.layout import SEGMENT, Ints, Records
from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.model.visibility import AllVisible, Visibility
from warploom.scheduler.partition import worklist
from warploom.scheduler.plans.plan import Plan


def make_segments(q_lens: Any, kv_lens: Any) -> Records:
    """Ragged requests, one segment each."""
    q_lens, kv_lens = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    segments = np.zeros(len(q_lens), SEGMENT.dtype)
    segments["batch"] = np.arange(len(q_lens))
    segments["q_row"] = np.cumsum(q_lens) - q_lens
    segments["num_q"] = segments["q_len"] = q_lens
    segments["kv_len"] = segments["kv_count"] = kv_lens
    return segments


@dataclass(frozen=True)
class Window:
    """Rows see keys from `left` before to `right` behind their position, and the first `sinks`."""

    segments: Records
    group_size: int
    left: int = 2**40
    right: int = 0
    sinks: int = 0

    def _window(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        shift = self.segments["kv_len"].astype(np.int64) - self.segments["q_len"]
        first = row_begin // self.group_size + shift[segment]
        last = (row_end - 1) // self.group_size + shift[segment]
        end = np.minimum(last + self.right + 1, self.segments["kv_count"][segment])
        return np.maximum(first - self.left, 0), np.maximum(end, 0)

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        begin, end = self._window(segment, row_begin, row_end)
        return (begin * 0 if self.sinks else begin), end

    def visible_tiles(
        self,
        segment: Ints,
        row_begin: Ints,
        row_end: Ints,
        kv_begin: Ints,
        kv_end: Ints,
        keys: int,
    ) -> Ints:
        begin, end = self._window(segment, row_begin, row_end)
        end = np.minimum(end, kv_end)
        after = np.maximum(-((kv_begin - end) // keys), 0)  # tiles that begin before the end
        first = np.clip((begin - kv_begin) // keys, 0, after)
        sink_end = np.minimum(self.sinks, end)
        sunk = np.clip(-((kv_begin - sink_end) // keys), 0, first)
        return after - first + sunk


class Holes:
    """Every key tile is visible or not by the throw of a die, differently for odd and even rows."""

    def __init__(self, segments: Records, rows: int, keys: int, seed: int, density: float) -> None:
        self.rows = rows
        self.count = segments["kv_count"].astype(np.int64)
        tiles = -(-self.count // keys)
        self.first = np.append(0, np.cumsum(tiles + 1))
        visible = np.random.default_rng(seed).random((2, int(self.first[-1]) + 1)) < density
        self.before = np.cumsum(visible, axis=1) - visible

    def kv_bounds(self, segment: Ints, row_begin: Ints, row_end: Ints) -> tuple[Ints, Ints]:
        return segment * 0, self.count[segment]

    def visible_tiles(
        self,
        segment: Ints,
        row_begin: Ints,
        row_end: Ints,
        kv_begin: Ints,
        kv_end: Ints,
        keys: int,
    ) -> Ints:
        odd, first = row_begin // self.rows % 2, self.first[segment]
        begin, end = first + kv_begin // keys, first - (-kv_end // keys)
        found = self.before[odd, end] - self.before[odd, begin]
        return np.where(kv_end > kv_begin, found, 0)


@dataclass(frozen=True)
class Case:
    """Everything `plan_of` takes."""

    segments: Records
    visibility: Visibility
    num_kv_heads: int = 1
    group_size: int = 1
    rows: int = 16
    keys: int = 64
    num_ctas: int = 8
    sm_limit: int | None = None
    split_size: int | None = None
    section_keys: int | None = None
    stream_k: bool = False
    piece_keys: int = 0

    @property
    def numbers(self) -> dict[str, Any]:
        """Arguments that `capacity` takes too."""
        names = ("rows", "keys", "num_kv_heads", "group_size", "num_ctas", "split_size")
        return {name: getattr(self, name) for name in names}

    def plan(self, **changes: Any) -> Plan:
        return plan_of(self.segments, **(self._arguments | changes))

    def problem(self) -> Problem:
        return problem_of(self.segments, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        names = "visibility", "sm_limit", "section_keys", "stream_k", "piece_keys"
        return {name: getattr(self, name) for name in names} | self.numbers

    def both(self) -> tuple[WorkList, WorkList]:
        """The fast planner's work list and the reference's."""
        text = plan_text_stream_k if self.stream_k else plan_text
        return worklist.build(self.problem()), text.build(self.problem())


def lengths(data: st.DataObject, size: int, longest: int, label: str) -> Ints:
    """Lengths of many shapes: equal, skewed, mostly short with giants, near multiples of tiles."""
    if size <= 4:
        return np.array([data.draw(st.integers(0, longest), label=label) for _ in range(size)], int)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label=f"{label} seed"))
    kind = data.draw(st.sampled_from(["equal", "skewed", "giants", "even", "tiles"]), label=label)
    if kind == "equal":
        return np.full(size, data.draw(st.integers(0, longest), label=label))
    if kind == "skewed":
        return np.minimum(rng.zipf(1.3, size), longest)
    if kind == "giants":
        return np.where(rng.random(size) < 0.1, longest, rng.integers(0, longest // 50 + 1, size))
    if kind == "even":
        return rng.integers(0, longest + 1, size)
    return np.clip(
        rng.integers(0, longest // 128 + 1, size) * 128 + rng.integers(-1, 2, size), 0, longest
    )


def draw_visibility(
    data: st.DataObject, segments: Records, group: int, rows: int, keys: int
) -> Any:
    kind = data.draw(st.sampled_from(["all", "causal", "window", "sinks", "holes"]), label="mask")
    if kind == "all":
        return AllVisible(segments)
    if kind == "holes":
        density = data.draw(st.sampled_from([0.02, 0.3, 0.9]), label="density")
        return Holes(segments, rows, keys, data.draw(st.integers(0, 99), label="seed"), density)
    if kind == "causal":
        return Window(segments, group)
    left = data.draw(st.integers(0, 5000), label="left")
    right = data.draw(st.integers(0, 300), label="right")
    return Window(segments, group, left, right, 70 if kind == "sinks" else 0)


def draw_case(
    data: st.DataObject,
    items: int = 20_000,
    fixed: bool | None = None,
    stream_k: bool | None = None,
    longest: Sequence[int] = (300, 5000, 100_000),
) -> Case:
    """A random case of about that many items or fewer.

    Args:
        fixed: with a split size, without, or either.
        stream_k: partitioned by Stream-K, longest first, or either.
        longest: how long the longest request may be: one of these.
    """
    rows = data.draw(st.sampled_from([16, 64, 128]), label="rows")
    keys = data.draw(st.sampled_from([32, 64, 128]), label="keys")
    heads = data.draw(st.sampled_from([1, 2, 5, 8]), label="heads")
    group = data.draw(st.sampled_from([1, 3, 4, 7, 8, 32]), label="group")
    most = max(1, min(1024, items // heads // (-(-group // rows))))
    size = data.draw(st.one_of(st.integers(0, 6), st.integers(0, most)), label="batch")
    room = items // heads * rows // group // max(size, 1)
    q_lens = lengths(data, size, max(1, min(room, 5000)), "q_len")
    most_keys = data.draw(st.sampled_from(longest), label="longest")
    kv_lens = lengths(data, size, most_keys, "kv_len")
    segments = make_segments(q_lens, kv_lens)
    num_ctas = data.draw(st.integers(1, 264), label="CTAs")
    limit = data.draw(st.one_of(st.none(), st.integers(1, 300)), label="SM limit")
    if stream_k is None:
        stream_k = not fixed and data.draw(st.booleans(), label="stream_k")
    split = None
    if stream_k:
        mask = draw_visibility(data, segments, group, rows, keys)
        return Case(segments, mask, heads, group, rows, keys, num_ctas, limit, stream_k=True)
    if fixed or (fixed is None and data.draw(st.booleans(), label="fixed split")):
        split = keys * (most_keys // keys // 32 + data.draw(st.integers(1, 99), label="split"))
        split -= data.draw(st.integers(0, keys - 1), label="rounded up")
    mask = draw_visibility(data, segments, group, rows, keys)
    section = data.draw(st.one_of(st.none(), st.integers(1, 4 * most_keys)), label="section")
    piece = data.draw(st.sampled_from([0, 100, 384]), label="keys of a piece")
    numbers = (heads, group, rows, keys, num_ctas, limit, split, section)
    return Case(segments, mask, *numbers, piece_keys=piece)


@dataclass(frozen=True)
class Kit:
    """Test files are no package, so what they share travels in one fixture."""

    make_segments: Callable[..., Records] = make_segments
    draw_case: Callable[..., Case] = draw_case
    case: type[Case] = Case
    window: type[Window] = Window


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
