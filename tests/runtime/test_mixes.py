"""Batches that may get two roles are counted by the native planner as single requests are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.codegen.attention.role_choice import MANY_ROWS
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.runtime.declaring.declare import make_spec
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.devices.device import resolve_device
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.base import Arguments
from warploom.runtime.formats.batch import Measured
from warploom.runtime.planning.host_strategy import HostPlanner
from warploom.runtime.planning.mixes import Mixes
from warploom.runtime.planning.visibility import Heads

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


@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Paged(16)], ids=["ragged", "paged"])
@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS)
def test_the_native_planner_counts_tiles_of_both_roles(
    kv_format: KVFormat, group: int, lengths: list[tuple[int, int]]
) -> None:
    mixes, planner = planner_of(kv_format, group)
    given = arguments(lengths, kv_format)
    measured: Any = planner.measure(given, None)
    assert isinstance(measured, Measured)
    fused = [rows * group for rows, _ in lengths]
    if len(lengths) < 2 or max(fused) <= MANY_ROWS:
        assert mixes.choice(measured, 1) is None
    expected = [counts(fused, [keys for _, keys in lengths], choice.tile) for choice in CHOICES]
    assert [measured.role_tiles(sizes, group) for sizes in mixes.sizes] == expected
    by_numpy = make_batch(kv_format, *given[:4])
    assert [by_numpy.role_tiles(sizes, group) for sizes in mixes.sizes] == expected


def counts(fused: list[int], keys: list[int], tile: TileConfig) -> tuple[int, int]:
    """Tiles of prefills and of decodes, of one head."""
    decode: Any = tile.decode
    pairs = list(zip(fused, keys, strict=True))
    prefills = sum(-(-r // tile.rows) * -(-k // tile.keys) for r, k in pairs if r > decode.rows)
    return prefills, sum(-(-k // decode.keys) for r, k in pairs if 0 < r <= decode.rows)


def planner_of(kv_format: KVFormat, group: int) -> tuple[Mixes, HostPlanner]:
    traced = traced_once(wl.Variant())[1]
    spec = make_spec(traced, 128, None, "bfloat16", kv_format, resolve_device("cpu"), None, False)
    mixes = Mixes(spec, Heads(8 * group, 8), CHOICES)
    return mixes, HostPlanner(traced, kv_format, group)


def test_counts_are_of_the_batch_that_was_measured() -> None:
    """Another batch may be measured before the roles of the first one are chosen."""
    mixes, planner = planner_of(wl.Paged(16), 4)
    first, second = [(700, 2000), (1, 900)], [(300, 400), (1, 50), (1, 60)]
    batches: list[Any] = [
        planner.measure(arguments(x, wl.Paged(16)), None) for x in (first, second)
    ]
    found = [batch.role_tiles(mixes.sizes[1], 4) for batch in batches]
    assert found == [(22 * 21, 6), (10 * 5, 2)]


@pytest.mark.parametrize(
    ("rows", "chosen"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, None)], ids="{} rows".format
)
def test_the_fewest_rows_that_hold_the_decodes_are_chosen(rows: int, chosen: int | None) -> None:
    """Requests that verify drafts beside a chunk: with 4 heads in a group, of 4 rows at most."""
    mixes, planner = planner_of(wl.Paged(16), 4)
    batch: Any = planner.measure(
        arguments([(2048, 8192)] + [(rows, 8192)] * 64, wl.Paged(16)), None
    )
    assert mixes.choice(batch, 132) is (None if chosen is None else CHOICES[chosen])
