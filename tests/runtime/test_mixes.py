"""Batches that may get two roles are counted by the native planner as single requests are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parts import compiled

import warploom as wl
from warploom.codegen.choice.role_choice import MANY_ROWS
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Measured
from warploom.runtime.planning.mixes import Mixes, may_be_mixed
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.host_strategy import HostPlanner

CHOICES = [
    TileChoice(TileConfig(128, 96, 8, 2, "hopper", 2, decode=TileConfig(rows, keys, 5, 2)))
    for rows, keys in ((8, 192), (16, 160))
]
LENGTHS = st.lists(
    st.tuples(st.sampled_from((0, 1, 1, 2, 4, 5, 8, 9, 17, 33, 700)), st.integers(0, 2000)),
    max_size=12,
)


def arguments(lengths: list[tuple[int, int]], kv_format: KVFormat) -> Arguments:
    """Index arrays of requests, given as (rows, keys)."""
    rows, keys = np.array(lengths, np.int64).reshape(-1, 2).T
    qo, page = np.append(0, np.cumsum(rows)), kv_format.block_kv or 1
    kv = np.append(0, np.cumsum(-(-keys // page)))
    if not kv_format.block_kv:
        return Arguments(qo.astype(np.int32), kv.astype(np.int32))
    last = np.where(keys > 0, (keys - 1) % page + 1, 0)
    qo, kv, pages, last = (x.astype(np.int32) for x in (qo, kv, np.arange(kv[-1]), last))
    return Arguments(qo, kv, pages, last)


WINDOWED = wl.Causal() & wl.SlidingWindow(500)
MASKS = {"none": wl.Variant(), "causal": wl.Causal(), "window": WINDOWED}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Paged(16)], ids=["ragged", "paged"])
@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS)
def test_the_native_planner_counts_tiles_of_both_roles(
    kv_format: KVFormat, group: int, mask: str, lengths: list[tuple[int, int]]
) -> None:
    wrapper, planner = planner_of(MASKS[mask], kv_format, group)
    given = arguments(lengths, kv_format)
    measured: Any = planner.measure(given, None)
    assert isinstance(measured, Measured)
    by_numpy = make_batch(kv_format, *given[:4])
    rules, mixes = compiled(wrapper).planner.rules, mixes_of(wrapper, group)
    if len(lengths) < 2 or max(rows * group for rows, _ in lengths) <= MANY_ROWS:
        assert not may_be_mixed(measured.sizes, group)
    expected = [counts(lengths, group, mask, choice.tile) for choice in CHOICES]
    inputs = wrapper._inputs
    assert [rules.role_tiles(by_numpy, inputs, sizes) for _, sizes, _ in mixes.all] == expected
    assert [planner.count(measured.lengths, inputs, sizes) for _, sizes, _ in mixes.all] == expected


def counts(
    lengths: list[tuple[int, int]], group: int, mask: str, tile: TileConfig
) -> tuple[int, int]:
    """Tiles of prefills and of decodes, of one head."""
    decode: Any = tile.decode
    prefills = decodes = 0
    for rows, keys in lengths:

        def span(begin: int, end: int, size: int, rows: int = rows, keys: int = keys) -> int:
            """Key tiles that hold all keys which fused rows see."""
            first, last = (keys - rows + row // group for row in (begin, end - 1))
            low = max(0, first - 500) if mask == "window" else 0
            high = keys if mask == "none" else min(keys, last + 1)
            return max(0, -(-high // size) - low // size) if low < high else 0

        fused = rows * group
        if fused > decode.rows:
            tiles = -(-fused // tile.rows)
            both = span(0, min(tile.rows, fused), tile.keys) + span(
                (tiles - 1) * tile.rows, fused, tile.keys
            )
            prefills += tiles * both // 2
        elif fused:
            decodes += span(0, fused, decode.keys)
    return prefills, decodes


def planner_of(
    variant: wl.Variant, kv_format: KVFormat, group: int
) -> tuple[wl.AttentionWrapper, HostPlanner]:
    """A wrapper, whose rules count, and a planner of its mask."""
    wrapper = wl.AttentionWrapper(
        variant, num_q_heads=8 * group, num_kv_heads=8, head_dim=128, dtype="bfloat16",
        kv_format=kv_format, device="cpu",
    )  # fmt: skip
    return wrapper, HostPlanner(wrapper.spec.variant, kv_format, Heads(8 * group, 8))


def mixes_of(wrapper: wl.AttentionWrapper, group: int) -> Mixes:
    return Mixes(wrapper.spec, Heads(8 * group, 8), CHOICES)


def test_counts_are_of_the_batch_that_was_measured() -> None:
    """Another batch may be measured before the roles of the first one are chosen."""
    wrapper, planner = planner_of(wl.Variant(), wl.Paged(16), 4)
    first, second = [(700, 2000), (1, 900)], [(300, 400), (1, 50), (1, 60)]
    batches: list[Any] = [
        planner.measure(arguments(x, wl.Paged(16)), None) for x in (first, second)
    ]
    sizes = mixes_of(wrapper, 4).all[1].sizes
    found = [planner.count(batch.lengths, wrapper._inputs, sizes) for batch in batches]
    assert found == [(22 * 21, 6), (10 * 5, 2)]


def test_heads_that_masks_read_are_known_before_anything_is_planned() -> None:
    class ByHead(wl.Variant):
        def logits_mask(self, at: Position) -> Value:
            shown = (at.kv_head >= 4) & (at.num_q_heads > 16)
            return shown & (at.kv_pos < 300 * at.num_kv_heads)

    wrapper, planner = planner_of(ByHead(), wl.Ragged(), 4)
    batch: Any = planner.measure(arguments([(700, 3000), (1, 2500)], wl.Ragged()), None)
    sizes = mixes_of(wrapper, 4).all[0].sizes
    expected = (22 * 25, 13)  # the first 2400 keys
    assert planner.count(batch.lengths, wrapper._inputs, sizes) == expected
    plain = make_batch(wl.Ragged(), *arguments([(700, 3000), (1, 2500)], wl.Ragged())[:4])
    assert compiled(wrapper).planner.rules.role_tiles(plain, wrapper._inputs, sizes) == expected


def test_masks_of_unknown_values_are_counted_by_numpy() -> None:
    """What the host does not know of a mask's tensor may hide nothing."""

    class Until(wl.Variant):
        ends = wl.Tensor("int32", ("batch",))

        def logits_mask(self, at: Position) -> Value:
            return at.kv_pos < self.ends[at.batch]

    wrapper, planner = planner_of(Until(), wl.Ragged(), 4)
    given = arguments([(700, 2000), (1, 900)], wl.Ragged())
    batch: Any = planner.measure(given, None)
    sizes = mixes_of(wrapper, 4).all[0].sizes
    assert planner.count(batch.lengths, wrapper._inputs, sizes) is None
    assert compiled(wrapper).planner._role_tiles(batch, wrapper._inputs, sizes) == (22 * 21, 5)


@pytest.mark.parametrize(
    ("rows", "chosen"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, None)], ids="{} rows".format
)
def test_the_fewest_rows_that_hold_the_decodes_are_chosen(rows: int, chosen: int | None) -> None:
    """Requests that verify drafts beside a chunk: with 4 heads in a group, of 4 rows at most."""
    wrapper, planner = planner_of(wl.Variant(), wl.Paged(16), 4)
    batch: Any = planner.measure(
        arguments([(2048, 8192)] + [(rows, 8192)] * 64, wl.Paged(16)), None
    )
    mixes = mixes_of(wrapper, 4)
    assert may_be_mixed(batch.sizes, 4)
    count: Any = partial(planner.count, batch.lengths, wrapper._inputs)
    found = mixes.choice(132, count)
    assert found is (None if chosen is None else CHOICES[chosen])
