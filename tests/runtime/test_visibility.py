"""The planner's answers never hide a visible key, add up over parts, and depend on no batching."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warploom.dsl.library.causal import Causal
from warploom.dsl.library.prefix_lm import PrefixLM
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.reference import visible
from warploom.dsl.types.formats import BlockSparse, Ragged
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.runtime.formats import HostBatch, make_batch
from warploom.runtime.planning import visibility as module
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.model.visibility import AllVisible

HEADS = Heads(num_q=4, num_kv=2)
Q_LENS, KV_LENS = (5, 1, 9, 9, 3), (40, 17, 9, 9, 0)
KEYS = 8


class PerHead(Variant):
    """Each group of heads sees another stripe."""

    width = Scalar("int32", default=10)

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos >= at.kv_head * self.width) & (at.kv_pos < (at.kv_head + 1) * self.width)


class Holes(Variant):
    """Visible in every third stretch of 8 keys, for some requests."""

    skipped = Tensor("int32", ("batch",))

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos // 8 % 3 == 0) | (at.kv_pos < self.skipped[at.batch])


VARIANTS: list[tuple[Variant, dict[str, Any]]] = [
    (Causal(), {}),
    (Causal() & SlidingWindow(6, sinks=2), {}),
    (PerHead(), {}),
    (PrefixLM(), {"prefix_len": np.array([3, 20, 0, 9, 1], np.int32)}),
    (Holes(), {"skipped": np.array([0, 5, 9, 0, 3], np.int32)}),
]


def ragged() -> HostBatch:
    return make_batch(Ragged(), np.cumsum([0, *Q_LENS]), np.cumsum([0, *KV_LENS]))


def answers(variant: Variant, inputs: dict[str, Any], batch: HostBatch, columns: int = 0) -> Any:
    traced = trace(variant)
    values = {**variant.inputs(), **inputs}
    analysis = TileAnalysis(traced, {n: x for n, x in values.items() if np.ndim(x) == 0}, inputs)
    return make_visibility(traced, analysis, batch.arrays, HEADS, columns)


def element_mask(variant: Variant, inputs: dict[str, Any], request: int) -> np.ndarray[Any, Any]:
    """[fused rows, keys]: visible to any key/value head."""
    q_len, kv_len = Q_LENS[request], KV_LENS[request]
    masks = [
        visible(
            variant, q_len=q_len, kv_len=kv_len, inputs=inputs, batch=request, q_head=head,
            kv_head=head // HEADS.group_size, num_q_heads=HEADS.num_q, num_kv_heads=HEADS.num_kv,
        )
        for head in range(HEADS.num_q)
    ]  # fmt: skip
    return np.repeat(np.any(masks, axis=0), HEADS.group_size, axis=0)


def tiles(rows: int) -> tuple[np.ndarray[Any, Any], ...]:
    """segment, row_begin and row_end of all row tiles."""
    found = [
        (i, begin, min(begin + rows, n * HEADS.group_size))
        for i, n in enumerate(Q_LENS)
        for begin in range(0, n * HEADS.group_size, rows)
    ]
    return tuple(np.array(found).T)


@pytest.fixture(params=[0, 10**6], ids=["likes joined", "all asked"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", request.param)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("variant", "inputs"), VARIANTS, ids=lambda x: getattr(x, "name", ""))
def test_no_visible_key_is_outside_of_the_bounds(variant: Variant, inputs: dict[str, Any]) -> None:
    found = answers(variant, inputs, ragged())
    segment, begin, end = tiles(3)
    low, high = found.kv_bounds(segment, begin, end)
    for i, (request, first, last) in enumerate(zip(segment, begin, end, strict=True)):
        seen = np.flatnonzero(element_mask(variant, inputs, request)[first:last].any(axis=0))
        assert (seen >= low[i]).all()
        assert (seen < high[i]).all()
        if not isinstance(variant, Holes):  # for the others the bounds are exact
            assert not len(seen) or (low[i], high[i]) == (seen[0], seen[-1] + 1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("variant", "inputs"), VARIANTS, ids=lambda x: getattr(x, "name", ""))
def test_counts_are_exact_and_add_up(variant: Variant, inputs: dict[str, Any]) -> None:
    found = answers(variant, inputs, ragged())
    segment, begin, end = tiles(3)
    keys = np.array(KV_LENS)[segment]
    whole = found.visible_tiles(segment, begin, end, np.zeros_like(keys), keys, KEYS)
    for i, (request, first, last) in enumerate(zip(segment, begin, end, strict=True)):
        mask = element_mask(variant, inputs, request)[first:last]
        seen = [mask[:, k : k + KEYS].any() for k in range(0, int(keys[i]), KEYS)]
        assert whole[i] == sum(seen)
    cut = np.minimum(keys, 2 * KEYS)
    parts = found.visible_tiles(segment, begin, end, np.zeros_like(keys), cut, KEYS)
    parts = parts + found.visible_tiles(segment, begin, end, cut, keys, KEYS)
    assert (parts == whole).all()


def test_unknown_tensors_leave_every_tile_visible() -> None:
    traced = trace(PrefixLM())
    blind = make_visibility(traced, TileAnalysis(traced, {}), ragged().arrays, HEADS)
    segment, begin, end = tiles(3)
    keys = np.array(KV_LENS)[segment]
    counted = blind.visible_tiles(segment, begin, end, np.zeros_like(keys), keys, KEYS)
    assert (counted == -(-keys // KEYS)).all()


def test_without_a_mask_everything_is_visible() -> None:
    assert isinstance(answers(Variant(), {}, ragged()), AllVisible)


def test_block_rows_are_judged_by_their_columns() -> None:
    lists = [[0, 2, 3], [1], [], [0, 1, 4]]
    indptr, indices = np.cumsum([0, *map(len, lists)]), np.concatenate(lists).astype(np.int32)
    batch = make_batch(BlockSparse(block=(4, 10)), [0, 14], indptr, indices, kv_lens=[45])
    found = answers(Causal(), {}, batch, columns=10)
    segment = np.arange(4)
    rows = np.array([4, 4, 4, 2]) * HEADS.group_size
    low, high = found.kv_bounds(segment, 0 * rows, rows)
    # q_pos is 31 + row: the rows of block row 0 see columns 0 .. 34, in places 0 .. 29 of its list
    assert list(zip(low.tolist(), high.tolist(), strict=True))[:3] == [(0, 30), (0, 10), (0, 0)]
    assert high[3] == 25  # the last block holds 5 keys
    count = found.visible_tiles(segment, 0 * rows, rows, 0 * rows, np.array([30, 10, 0, 25]), 5)
    assert count.tolist() == [5, 2, 0, 5]  # columns 35 .. 39 are hidden from block row 0


def test_block_rows_find_their_columns_in_their_own_lists() -> None:
    rng = np.random.default_rng(3)
    lists = [np.sort(rng.choice(50, size, replace=False)) for size in rng.integers(0, 20, 50)]
    indptr, indices = np.cumsum([0, *map(len, lists)]), np.concatenate(lists).astype(np.int32)
    batch = make_batch(BlockSparse(block=(10, 10)), [0, 500], indptr, indices, kv_lens=[500])
    found = answers(Causal() & SlidingWindow(95), {}, batch, columns=10)
    rows = np.full(50, 10 * HEADS.group_size)
    low, high = found.kv_bounds(np.arange(50), 0 * rows, rows)
    for i, listed in enumerate(lists):
        first = max(0, 10 * i - 95) // 10
        expected = np.flatnonzero((listed >= first) & (listed <= i))
        assert low[i] <= high[i]
        assert np.arange(low[i], high[i], 10).tolist() == (10 * expected).tolist()
