"""Layouts hold each token once, and kernels work out the right positions and tile classes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import warploom as wl
from warploom import distributed as wld
from warploom.dsl.masks.intervals import FULL, PARTIAL, SKIP, TileAnalysis
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, BoundsExceeded, UnsupportedSpec, WrongShape
from warploom.runtime.planning.visibility import Heads
from warploom.serving.distributed.layouts import Layout
from warploom.serving.distributed.placed import FIELD, Placed
from warploom.serving.distributed.placement import Placement, check_sizes, table_of

LAYOUTS = st.builds(wld.Interleaved, st.integers(1, 9), st.integers(1, 7)) | st.builds(
    wld.ZigZag, st.integers(1, 9)
)


@given(LAYOUTS, st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_each_token_lies_on_one_rank(layout: Layout, lengths: list[int]) -> None:
    order = layout.order(lengths)
    assert np.array_equal(np.sort(order), np.arange(sum(lengths)))
    for rank in range(layout.world):
        own = layout.local_len(lengths, rank)
        assert [len(layout.positions(n, rank)) for n in lengths] == own.tolist()
        assert torch.equal(layout.local_len(torch.tensor(lengths), rank), torch.from_numpy(own))
        for n in lengths:
            assert np.all(np.diff(layout.positions(n, rank)) > 0)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 200))
def test_engines_find_where_a_token_goes(world: int, block: int, position: int) -> None:
    layout = wld.Interleaved(world, block)
    rank, place = layout.owner(position), layout.place(position)
    assert layout.positions(position + 1, rank)[place] == position
    assert layout.local_len(position + 1, rank) == place + 1


@given(st.integers(1, 9), st.integers(0, 500))
def test_zig_zag_ranks_have_the_same_causal_work(world: int, length: int) -> None:
    layout = wld.ZigZag(world)
    work = [int((layout.positions(length, rank) + 1).sum()) for rank in range(world)]
    assert max(work) - min(work) <= 2 * length
    order = wld.zigzag_order(length, world)
    assert np.array_equal(
        order, np.concatenate([layout.positions(length, r) for r in range(world)])
    )


def placed_tiles(layout: Layout, is_decode: bool, ranks: tuple[int, int]) -> Any:
    """The analysis of a causal window on ranks, and what it truly shows: [rows, keys]."""
    variant = Placed(wl.Causal() & wl.SlidingWindow(70), None if is_decode else layout, layout)
    q_len, kv_len = (9, 200) if is_decode else (200, 200)
    q_lens, kv_lens = np.array([q_len]), np.array([kv_len])
    table = table_of(variant, *ranks, kv_lens=kv_lens, q_lens=q_lens, q_rows=q_lens * 0)
    scalars = {"left": 70, "right": -1, "sinks": 0}
    analysis = TileAnalysis(trace(variant), scalars, {"placement": table})
    rows = np.arange(q_len) if is_decode else layout.positions(q_len, ranks[0])
    at, keys = rows[:, None] + kv_len - q_len, layout.positions(kv_len, ranks[1])[None]
    return analysis, (keys <= at) & (keys >= at - 70)


@pytest.mark.parametrize(
    ("layout", "is_decode"),
    [(wld.Interleaved(3), True), (wld.Interleaved(3, 4), True), (wld.ZigZag(3), False)],
    ids=str,
)
def test_tiles_are_classified_by_positions_of_the_whole(layout: Layout, is_decode: bool) -> None:
    """Never wrong, and exact but for tiles that hold the border of two chunks or blocks."""
    unsharp = total = 0
    for ranks in ((r, s) for r in range(3) for s in range(3)):
        analysis, seen = placed_tiles(layout, is_decode, ranks)
        rows, keys = seen.shape
        for q, k in ((q, k) for q in range(0, rows, 8) for k in range(0, keys, 8)):
            tile = seen[q : q + 8, k : k + 8]
            first = q + keys - rows
            (found,) = analysis.classify(
                batch=np.array([0]), kv_head=np.array([0]), q_head=(np.array([0]), np.array([1])),
                q_len=np.array([rows]), kv_len=np.array([keys]),
                num_q_heads=np.array([1]), num_kv_heads=np.array([1]),
                q_pos=(np.array([first]), np.array([first + len(tile)])),
                kv_pos=(np.array([k]), np.array([k + tile.shape[1]])),
            )  # fmt: skip
            exact = FULL if tile.all() else PARTIAL if tile.any() else SKIP
            assert found in (exact, PARTIAL)
            unsharp, total = unsharp + (found != exact), total + 1
    assert unsharp <= (0 if repr(layout) == "Interleaved(3, block=1)" else 0.15 * total)


BIAS = torch.zeros(20)


class Recorder(wl.Variant):
    seen = wl.Output("float32", ("q_row", "q_head", "kv_pos"))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return self.seen.record(logits, at)


class Named(wl.Variant):
    placement = wl.Scalar("float32")

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits * self.placement


def test_what_cannot_be_placed_is_refused() -> None:
    layout = wld.Interleaved(2)
    with pytest.raises(UnsupportedSpec, match="recording in 'seen'"):
        Placed(Recorder(), None, layout)
    with pytest.raises(ArgumentError, match="rename"):
        Placed(Named(), None, layout)
    with pytest.raises(ArgumentError, match="whole number"):
        wld.ZigZag(0)


class ByPosition(wl.Variant):
    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + wl.to_float(at.kv_pos)


def test_a_plan_that_is_refused_leaves_the_memory_of_graphs() -> None:
    """They read where the table is, whichever way the batch is refused."""
    bounds = wl.Bounds(2, 2, 64)
    placed = Placed(ByPosition(), None, wld.Interleaved(2))
    wrapper = wl.AttentionWrapper(
        placed, num_q_heads=2, head_dim=16, device="cpu", bounds=bounds, backend="reference"
    )
    placement = Placement(wrapper, bounds)
    found = []
    for count, is_refused in ((2, False), (3, True), (2, True), (1, False)):
        table = np.full((count, placed.num_columns), 10 * count + is_refused, np.int32)
        with suppress(BoundsExceeded), placement.given(table) as given:
            found.append(given[FIELD])
            if is_refused:
                raise BoundsExceeded(name="max_requests", got=3, bound=2)
    first, beyond, refused, last = found
    assert beyond.shape == (3, placed.num_columns)
    assert first is refused is last and first[:, 0].tolist() == [10, 20]


def test_tensors_must_reach_as_far_as_whole_sequences() -> None:
    lengths = np.array([40])
    for variant in (
        wl.DocumentMask(np.zeros((1, 20), np.int32)),
        wl.flex(lambda score, b, h, i, j, bias=BIAS: score + bias[j]),
    ):
        placed = Placed(variant, None, wld.Interleaved(2))
        with pytest.raises(WrongShape):
            check_sizes(placed, {}, Heads(2, 1), lengths, lengths)
        check_sizes(placed, {}, Heads(2, 1), lengths // 2, lengths // 2)
