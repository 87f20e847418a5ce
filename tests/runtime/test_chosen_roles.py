"""Which batches get two roles by themselves on a GPU (decision 0056)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu_planners import MakePlanner, choice, declared, of_lengths, planners

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.source import TileConfig
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.planning.mixes import may_hold_prefills
from warploom.runtime.planning.rules import Rules
from warploom.runtime.strategies.scratch import role_scratch_bytes
from warploom.scheduler.model.roles import SHORTEST_CUT

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> MakePlanner:
    return planners(monkeypatch)


def test_a_chunk_beside_decodes_of_one_prefix_gets_two_roles_where_they_pay(
    planner: MakePlanner,
) -> None:
    """What decodes share is read once, by tiles of prefills; alone it makes no batch mixed."""

    composed, paged = wl.Composed(16), wl.Paged(16)

    def batch(q: list[int], prefix: int, own: int, kv_format: wl.Paged = composed) -> Batch:
        count, shared, pages = len(q), prefix // 16, own // 16
        parts = [wl.Part(range(count), range(shared))]
        fresh = range(shared, shared + pages * (count + 1), pages)
        parts += [wl.Part([i], range(fresh[i], fresh[i + 1])) for i in range(count)]
        table = wl.compose(parts, num_requests=count, page_size=16)
        return make_batch(kv_format, np.append(0, np.cumsum(q)), **table)

    made = planner(declared(kv_format=composed), ARCHS["sm_90a"], 132)[0]
    many = [1] * 40
    assert choice(made, batch([900, *many], 4096, 4096)).tile.of_roles
    assert not choice(made, batch([1, *many], 4096, 4096)).tile.of_roles
    # 40 reads of 64k keys pay, one does not
    long = [900, *many], 65_536, 16
    assert not choice(made, batch(*long)).tile.of_roles
    single = planner(declared(kv_format=paged), ARCHS["sm_90a"], 132)[0]
    assert choice(single, batch(*long, kv_format=paged)).tile.of_roles


def test_mixed_batches_get_two_roles_where_they_pay(
    planner: MakePlanner,
    host: HostTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper, older = ARCHS["sm_90a"], ARCHS["sm_80"]
    many = [1] * 40
    plain = declared(kv_format=wl.Ragged())
    made = planner(plain, hopper, 132)[0]
    assert choice(made, of_lengths([900, *many, 0])).tile.of_roles
    assert choice(made, of_lengths([*many, 900, 4])).tile.of_roles  # of 16 fused rows at most
    for others in (many, [900, 900], [900], [], [900, 0, 5], [16, *many]):
        assert not choice(made, of_lengths(others)).tile.of_roles, others
    assert choice(made, of_lengths([900, *many], 900)).tile.of_roles
    assert choice(made, of_lengths([900, *many], 20)).tile.of_roles  # short ones, too
    assert not choice(made, of_lengths([4000, 4000, 1])).tile.of_roles  # hardly anything decodes
    for window, pays in ((100, False), (50_000, True)):  # keys that nobody sees cost nothing
        variant = wl.Causal() & wl.SlidingWindow(window)
        windowed = planner(declared(variant, kv_format=wl.Ragged()), hopper, 132)[0]
        indptr = np.array([0, 2000, 2001]), np.array([0, 2000, 202_000])
        found = choice(windowed, make_batch(wl.Ragged(), *indptr), variant)
        assert bool(found.tile.of_roles) == pays
    monkeypatch.setenv("WARPLOOM_MIXED_ROLES", "0")
    off = planner(plain, hopper, 132)[0]
    assert not choice(off, of_lengths([900, *many])).tile.of_roles
    monkeypatch.delenv("WARPLOOM_MIXED_ROLES")
    mixed = wl.Bounds(max_requests=41, max_q_rows=940, max_kv_len=40_000)
    with_bounds = planner(declared(kv_format=wl.Ragged(), bounds=mixed), hopper, 132)[0]
    assert choice(with_bounds, of_lengths([900, *many])).tile.of_roles
    assert not choice(with_bounds, of_lengths(many)).tile.of_roles
    of_decodes = declared(kv_format=wl.Ragged(), bounds=replace(mixed, max_q_rows=41))
    for declaration, arch in ((of_decodes, hopper), (plain, older)):
        other = planner(declaration, arch, 132)[0]
        assert not choice(other, of_lengths([900, *many])).tile.of_roles
    jobs = list(plain.jobs(hopper, [host]))
    assert {source.code for source, _ in jobs} >= {
        source.code
        for batch in (of_lengths([900, *many]), of_lengths([1, 1]))
        for source in planner(plain, hopper, 132)[1].sources(choice(made, batch))
    }
    assert sum("warploom_planner" in source.code for source, of in jobs if of is host) == 3


@pytest.mark.parametrize(
    ("requests", "rows", "has_both"),
    [
        (41, 940, True),
        (160, 4224, True),  # a chunk of 4k, and decodes
        (256, 2048, True),
        (1024, 2048, False),  # drafts, as far as anybody knows
        (41, 41, False),  # decodes alone
        (64, 64 * 4, False),  # drafts
        (32, 8192, False),  # mostly prompts
        (1, 4096, False),
        (1025, 2048, False),  # more requests than a device plans for
    ],
)
def test_one_kernel_has_two_roles_where_prefills_may_come_beside_decodes(
    planner: MakePlanner, requests: int, rows: int, has_both: bool
) -> None:
    """All batches have that kernel; without a graph room for it would depend on the batch."""
    bounds = wl.Bounds(requests, rows, 8192)
    for cuda_graph in (True, False):
        declaration = declared(kv_format=wl.Ragged(), bounds=bounds, cuda_graph=cuda_graph)
        made = planner(declaration, ARCHS["sm_90a"], 132)[0]
        both = has_both and cuda_graph
        for of in (rows, requests):
            unread = OnDevice.of((None,) * 4, requests, of, bounds)
            assert bool(choice(made, unread).tile.of_roles) == both
        assert bool(choice(made, of_lengths([1] * requests)).tile.of_roles) == both


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_invariant": True},
        {"kv_format": wl.BlockSparse((16, 16)), "bounds": wl.Bounds(160, 4224, 8192, 1024, 160)},
        {"head_dim": 96},  # not measured
        {"head_dim": 64, "num_q_heads": 16, "num_kv_heads": 1},  # likewise
        {"num_q_heads": 17, "num_kv_heads": 1},  # no tile of decodes has rows for a group
    ],
)
def test_kernels_without_roles_stay_so(planner: MakePlanner, changes: dict[str, Any]) -> None:
    options = {"kv_format": wl.Ragged(), "bounds": wl.Bounds(160, 4224, 8192), **changes}
    made = planner(declared(cuda_graph=True, **options), ARCHS["sm_90a"], 132)[0]
    assert made.rules.fixed is not None
    assert not made.rules.fixed.tile.of_roles


def test_kernels_built_ahead_serve_memory_of_the_callers_too(
    planner: MakePlanner, host: HostTarget
) -> None:
    """In which wrappers have one tile, for two roles want more of it."""
    declaration = declared(
        kv_format=wl.Paged(16), bounds=wl.Bounds(256, 2048, 8192, 131_072), cuda_graph=True
    )
    made = planner(declaration, ARCHS["sm_90a"], 132)[0]
    given = replace(made.rules.options, may_mix=False)
    built = {source.code for source, _ in declaration.jobs(ARCHS["sm_90a"], [host])}
    kinds = set()
    for options in (made.rules.options, given):
        rules = Rules(made.rules.spec, made.rules._kernels, made.rules.heads, options, DEVICE)
        assert rules.fixed is not None
        kinds.add(bool(rules.fixed.tile.of_roles))
        assert {source.code for source in made.rules._kernels.sources(rules.fixed)} <= built
    assert kinds == {True, False}
    assert sum("role_planner" in code for code in built) == 2  # of the host and the device
    assert sum("RolePlanner" not in code and "warploom_planner" in code for code in built) >= 2


@pytest.mark.parametrize("group_size", [1, 4, 8, 32])
def test_devices_plan_the_largest_such_batch(group_size: int) -> None:
    requests, sms = 1024, max(132, 148)
    rows = min(64 * requests, 2048 * 128 // group_size)
    assert may_hold_prefills(requests, rows, group_size)
    assert not may_hold_prefills(requests + 1, rows, group_size)
    scratch = role_scratch_bytes(rows * group_size // 128 + requests, requests, sms)
    assert scratch <= ARCHS["sm_90a"].shared_per_cta - PlannerSpec.RESERVED


@pytest.mark.parametrize(
    ("table", "batches", "most", "least", "gain"),
    [("role_sweep", range(20), 1.1, 0.99, 1.09), ("mixed_drawn", range(40, 100), 1.05, 0.97, 1.2)],
    ids=["H100", "held out, H200"],
)
def test_mixed_batches_of_recorded_sweeps_get_the_faster_way(
    planner: MakePlanner,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    batches: range,
    most: float,
    least: float,
    gain: float,
) -> None:
    """Even batches and drawn ones, each with two roles and one tile. The rule's numbers were fitted
    to batches 0 to 39 of the second. The first is from before short prefills were left whole
    (decision 0057), so that it counts where prefills are cut as they were."""
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    mixed = __import__("mixed_batches")
    _, *rows = map(json.loads, (benchmarks / f"results/{table}.jsonl").read_text().splitlines())
    times = {(row["case"], row["impl"]): row["value"] for row in rows}
    losses, gains = [], []
    for batch in (*mixed.table_batches(), *map(mixed.drawn_batch, batches)):
        keys = min(batch.context, mixed.KINDS[batch.kind].window or batch.context)
        is_whole = table == "role_sweep" and keys < SHORTEST_CUT
        if is_whole or (batch.name, "two roles") not in times:
            continue
        q_heads, kv_heads = batch.heads
        variant = mixed.KINDS[batch.kind].variant()
        ends = (np.append(0, np.cumsum(x)) for x in (batch.shape.q_lens, batch.shape.kv_lens))
        of = declared(variant, kv_format=wl.Ragged(), num_q_heads=q_heads, num_kv_heads=kv_heads)
        made = planner(of, ARCHS["sm_90a"], 132)[0]
        lengths = make_batch(wl.Ragged(), *(x.astype(np.int32) for x in ends))
        chosen = choice(made, lengths, variant)
        two, one = times[batch.name, "two roles"], times[batch.name, "one tile"]
        took = two if chosen.tile.of_roles else one
        losses.append(took / min(two, one))
        gains.append(one / took)
    assert len(losses) == {"role_sweep": 24, "mixed_drawn": 60}[table]
    assert max(losses) < most and np.exp(np.log(losses).mean()) < 1.01
    assert min(gains) > least and np.exp(np.log(gains).mean()) > gain


def test_pages_count_by_the_keys_that_they_hold(
    planner: MakePlanner,
) -> None:
    """One page of a virtual cache is as long as any request may get."""
    made = planner(declared(kv_format=wl.Paged(65536)), ARCHS["sm_90a"], 132)[0]
    q, pages = np.array([0, 900, 901], np.int32), np.arange(3, dtype=np.int32)

    def roles(keys: int) -> bool:
        last = np.array([1000, keys], np.int32)
        batch = make_batch(wl.Paged(65536), q, pages, pages[:-1], last)
        return bool(choice(made, batch).tile.of_roles)

    assert roles(50_000) and not roles(20)


def test_block_rows_are_no_decodes(planner: MakePlanner) -> None:
    """They share keys, which two roles would read once for each."""
    blocks = wl.BlockSparse((1, 64))
    made = planner(declared(kv_format=blocks), ARCHS["sm_90a"], 132)[0]
    rows, keys = 1024, 65536
    indptr = np.arange(rows + 1) * (keys // 64)
    batch = make_batch(
        blocks, np.array([0, rows]), indptr, np.tile(np.arange(keys // 64), rows),
        kv_lens=np.array([keys]),
    )  # fmt: skip
    assert not choice(made, batch).tile.of_roles


def kernel_of(tile: TileConfig, num_ctas: int) -> Any:
    """As much of a kernel as prices ask for."""
    return SimpleNamespace(tile=tile, num_ctas=num_ctas)


def test_ctas_that_share_an_sm_share_its_speed(planner: MakePlanner) -> None:
    rules = planner(declared(kv_format=wl.Ragged()), ARCHS["sm_90a"], 132)[0].rules
    assert rules.mixes is not None
    tile = rules.mixes.all[0].choice.tile
    alone, shared = (rules.prices(kernel_of(tile, n)) for n in (132, 264))
    assert alone is not None and shared is not None
    assert shared.saturating == 2 * alone.saturating
    for one, two in zip(alone.units, shared.units, strict=True):
        assert 2 * one - 1 <= two <= 2 * one  # rounded up from the price of a tile
    work = (10**6, 3 * 10**6)
    prefills, decodes = alone.ctas(work, 132)
    assert abs(shared.ctas(work, 264)[0] - 2 * prefills) <= 1
    assert sum(shared.ctas(work, 264)) == 2 * (prefills + decodes)


def test_ctas_that_a_limit_leaves_have_an_sm_each(planner: MakePlanner) -> None:
    limited = declared(kv_format=wl.Ragged(), sm_limit=108)
    rules = planner(limited, ARCHS["sm_90a"], 132)[0].rules
    free = planner(declared(kv_format=wl.Ragged()), ARCHS["sm_90a"], 132)[0].rules
    assert free.mixes is not None
    tile = free.mixes.all[0].choice.tile
    assert rules.prices(kernel_of(tile, 264)) == free.prices(kernel_of(tile, 132))


def test_the_memory_that_docs_state(planner: MakePlanner) -> None:
    """For the bounds of docs/options.md, and beside one tile of either template."""
    told = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    found = re.search(r"some (\d+) MB of workspace, (\d+) to (\d+) MB more", told)
    assert found is not None
    bounds = wl.Bounds(256, 2048, 8192, 131_072)
    declaration = declared(
        kv_format=wl.Paged(16), bounds=bounds, cuda_graph=True, num_q_heads=32, num_kv_heads=8
    )
    rules = planner(declaration, ARCHS["sm_90a"], 132)[0].rules
    assert rules.fixed is not None
    both, one, portable = (
        rules.sizes(bounds, tile, ctas)[1].total / 1e6
        for tile, ctas in (
            (rules.fixed.tile, 132),
            (replace(rules.fixed.tile, decode=None), 132),
            (wl.TileConfig(16, 64), 4 * 132),
        )
    )
    assert [round(both), round(both - one), round(both - portable)] == [*map(int, found.groups())]
