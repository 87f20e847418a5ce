"""Prefill and decode in one launch of either template, run by fibers on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.emulator import Emulator
from support.query_rope import QueryRope

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.runtime.planning import rules
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import planning as composed
from warploom.scheduler.composed import sharing
from warploom.scheduler.model.roles import RolePrices

SMALL = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(16, 64, 2, 2))
TALL = TileConfig(128, 64, 8, 2, "hopper", 1, decode=TileConfig(16, 96, 3, 2))
SHORT = TileConfig(64, 64, 4, 2, decode=TileConfig(16, 64, 2, 2))
WIDE = TileConfig(128, 32, 8, 2, decode=TileConfig(16, 128, 4, 2))
TURNED = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(8, 96, 3, 2))
EIGHT = TileConfig(64, 64, 4, 2, decode=TileConfig(8, 64, 2, 2))
E4M3 = "float8_e4m3fn"
JOBS: list[tuple[Variant, KVFormat, str, TileConfig]] = [
    (wl.Causal(), wl.Paged(16), "bfloat16", SMALL),
    (wl.Causal(), wl.Ragged(), "float16", TALL),
    (wl.Causal() & wl.SoftCap(5.0), wl.Paged(1), "bfloat16", SMALL),
    (wl.Causal() & wl.Alibi(), wl.Paged(16), "bfloat16", TALL),
    (wl.Causal() & wl.SlidingWindow(40), wl.Ragged(), "bfloat16", TALL),
    (wl.Alibi() & wl.FlashSigmoid(bias=-2.0), wl.Paged(3), "float16", SMALL),
    (wl.Causal() & wl.Rope(), wl.Paged(16), "bfloat16", SHORT),
    (wl.Causal() & wl.SoftCap(5.0), wl.Ragged(), "float16", WIDE),
    (wl.Causal() & wl.SoftCap(5.0), wl.Paged(16), "bfloat16", TURNED),
    (wl.Causal() & wl.Alibi(), wl.Paged(8), "float16", TURNED),
    (wl.Causal() & wl.SoftCap(5.0), wl.Paged(40), "bfloat16", TURNED),  # boxes of 8 tokens
    (wl.Alibi() & wl.FlashSigmoid(bias=-2.0), wl.Paged(16), "bfloat16", TURNED),
    # transforms by the warps that compute
    (wl.Causal() & QueryRope(), wl.Paged(16), "bfloat16", TURNED),
    (wl.Causal() & wl.Rope(), wl.Ragged(), "float16", TALL),
    (wl.Causal() & wl.QKNorm(), wl.Paged(3), "bfloat16", SMALL),
    # prefixes that requests share are prefills, and what decodes have for their own are decodes
    (wl.Causal() & wl.SoftCap(5.0), wl.Composed(16), "bfloat16", TURNED),
    (wl.Causal() & wl.Alibi(), wl.Composed(8), "float16", TALL),
    (wl.FlashSigmoid(bias=-2.0), wl.Composed(3), "bfloat16", SMALL),
    (wl.Causal() & wl.SoftCap(5.0), wl.Composed(1), "float16", WIDE),
    (wl.Causal() & QueryRope(), wl.Composed(16), "bfloat16", SHORT),
]
MIXES = [
    ([70, 1, 0, 33, 1, 2], [130, 257, 40, 33, 500, 64]),
    ([1, 4, 1], [300, 40, 0]),  # decodes alone
    ([100, 60], [200, 60]),  # prefills alone
    ([1, 90, 1, 1], [64, 700, 32, 1000]),
    ([40, *[1] * 4], [40, *[2500] * 4]),  # of which some are claimed
]


@pytest.fixture(scope="module", autouse=True)
def the_shortest_lists_are_worth_claiming_and_cutting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolePrices, "least_claim", lambda _, model, keys: model.least_slice)
        patch.setattr(RolePrices, "cut_tiles", lambda _, keys: 0)
        yield


def check(
    emulator: Emulator,
    job: int,
    lengths: tuple[list[int], list[int]],
    order: int,
    sm_limit: int | None = None,
) -> None:
    variant, kv_format, dtype, tile = JOBS[job]
    setup = Setup(kv_format, dtype, 128, 128, tile=tile)
    check_groups(emulator, variant, setup, lengths, order, sm_limit=sm_limit)


def check_groups(
    emulator: Emulator,
    variant: Variant,
    setup: Setup,
    lengths: tuple[list[int], list[int]],
    order: int,
    group_size: int = 4,
    sm_limit: int | None = None,
) -> None:
    q_lens, kv_lens = map(tuple, lengths)
    case = Case(setup, q_lens, kv_lens, 2, group_size, seed=order, sm_limit=sm_limit)
    emulator.order = order
    found = mismatch(variant, case)
    assert found is None, f"order {order}: {case}: {found}"


@pytest.mark.some(1)
@pytest.mark.parametrize("job", range(len(JOBS)))
def test_mixes_are_right(emulator: Emulator, job: int) -> None:
    for order, lengths in enumerate(MIXES):
        check(emulator, job, lengths, order + 7 * job)
    check(emulator, job, ([3, 1, 3, 31], [0, 64, 76, 15]), 1, sm_limit=2)


@pytest.mark.some(1)
@pytest.mark.parametrize("job", range(len(JOBS)))
def test_whole_prefills_are_claimed_one_after_another(
    emulator: Emulator, job: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than CTAs have for their own; with an item open before the one in front is done."""
    monkeypatch.setattr(RolePrices, "cut_tiles", lambda self, keys: -(-self.shortest_cut // keys))
    for order, lengths in enumerate([*MIXES[:3], ([300, 1, 1, 200], [300, 500, 64, 900])]):
        check(emulator, job, lengths, order + 7 * job)


@pytest.mark.some(1)
@pytest.mark.parametrize("job", [i for i, job in enumerate(JOBS) if job[1].composed])
def test_prefixes_are_read_by_tiles_of_either_role(
    emulator: Emulator, job: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever may be a part is one; those of many rows are prefills, those of few are decodes."""
    monkeypatch.setattr(sharing, "PER_ITEM", 0)
    monkeypatch.setattr(sharing, "PER_ROW", 0)
    seen: set[int] = set()
    made = composed.ComposedPlan

    def noted(**sections: Any) -> Any:
        plan = made(**sections)
        of_prefixes = plan.items["segment"] < len(plan.segments) - len(plan.problem.segments)
        seen.update(plan.role[of_prefixes].tolist())
        return plan

    monkeypatch.setattr(composed, "ComposedPlan", noted)
    for order, count in enumerate((40, 2)):
        lengths = [70, *[1] * count], [600, *(300 + 5 * i for i in range(count))]
        check(emulator, job, lengths, order + 7 * job)
    assert seen == {0, 1}


# Of eight query heads two rows are a decode to 16 rows, and a prefill to eight.
GROUPED = [([60, 1, 2, 1, 0], [130, 500, 64, 257, 33]), *MIXES[1:3], ([9, 1, 1], [200, 1, 0])]


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", [TALL, TURNED, SHORT], ids=["hopper", "turned", "portable"])
def test_query_heads_are_alone_or_many_to_a_key_head(emulator: Emulator, tile: TileConfig) -> None:
    setup = Setup(wl.Paged(16), "bfloat16", 64, 64, tile=tile)
    for order, lengths in enumerate(GROUPED):
        for group_size in (1, 8):
            check_groups(emulator, wl.Causal(), setup, lengths, order + 3, group_size)


NARROW = [
    (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 64, 64, "cpu", SHORT, E4M3)),
    (wl.Causal() & wl.HeadKVScale(), Setup(wl.Ragged(), "float16", 64, 64, "cpu", EIGHT, E4M3)),
    (wl.Causal() & wl.SoftCap(5.0), Setup(wl.Composed(16), "bfloat16", 64, 64, "cpu", WIDE, E4M3)),
    (wl.Causal() & QueryRope(), Setup(wl.Paged(3), "bfloat16", 128, 128, "cpu", SHORT, E4M3)),
    # widened by the warps that compute
    (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 128, 128, "cpu", TURNED, E4M3)),
    (wl.Causal() & wl.HeadKVScale(), Setup(wl.Ragged(), "float16", 128, 128, "cpu", TALL, "int8")),
    (wl.Causal() & wl.SoftCap(5.0), Setup(wl.Paged(3), "bfloat16", 128, 128, "cpu", SMALL, E4M3)),
    (wl.Causal() & wl.Rope(), Setup(wl.Composed(16), "bfloat16", 128, 128, "cpu", TURNED, E4M3)),
    (wl.TokenKVScale(), Setup(wl.Ragged(), "bfloat16", 128, 128, "cpu", TURNED, "float8_e5m2")),
]


@pytest.mark.some(2)
@pytest.mark.parametrize("case", range(len(NARROW)))
def test_two_roles_read_8_bit_caches(emulator: Emulator, case: int) -> None:
    variant, setup = NARROW[case]
    for order, lengths in enumerate([*MIXES[:3], GROUPED[0]]):
        check_groups(emulator, variant, setup, lengths, order + 3, 8 if order == 3 else 4)


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", [SMALL, WIDE, TURNED], ids=["hopper", "portable", "turned"])
def test_bits_do_not_depend_on_neighbours_if_so_wanted(
    emulator: Emulator, tile: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed chunks of either role, of which some are claimed: alone, among others, by few CTAs."""
    monkeypatch.setattr(rules, "INVARIANT_SPLIT", 160)
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": "float16"}
    options = {"kv_format": wl.Ragged(), "device": "cpu", "tile": tile, "batch_invariant": True}
    q_lens, kv_lens = [70, *[1] * 5], [400, 500, 300, 190, 390, 20]
    torch.manual_seed(0)
    q, (k, v) = torch.randn(75, 4, 128).half(), torch.randn(2, sum(kv_lens), 2, 128).half()
    rows, keys, values = (torch.split(*x) for x in ((q, q_lens), (k, kv_lens), (v, kv_lens)))
    alone = wl.AttentionWrapper(wl.Causal(), **shape, **options)
    expected = []
    for number, (own, count) in enumerate(zip(q_lens, kv_lens, strict=True)):
        alone.plan([0, own], [0, count])
        expected.append(alone.run(rows[number], (keys[number], values[number])).clone())
    for order, limit in ((0, None), (8, None), (3, 1), (5, 2)):
        emulator.order = order
        among = wl.AttentionWrapper(wl.Causal(), **shape, **options, sm_limit=limit)
        among.plan(np.cumsum([0, *q_lens]), np.cumsum([0, *kv_lens]))
        assert among.planned is not None
        assert among.planned.plan.num_slots > 0
        assert (among.planned.plan.num_shared_prefills > 0) == (limit != 1)
        assert torch.equal(among.run(q, (k, v)), torch.cat(expected))


def test_a_plan_runs_again_as_it_ran_first(emulator: Emulator) -> None:
    """Whoever claims last leaves the counters at zero, as replays of a graph need them."""
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float16", device="cpu", tile=SMALL,
    )  # fmt: skip
    q_lens, kv_lens = [70, *[1] * 5], [130, 1900, 1700, 1800, 2000, 1600]
    attention.plan(np.cumsum([0, *q_lens]), np.cumsum([0, *kv_lens]))
    assert attention.planned is not None
    assert attention.planned.plan.num_shared_decodes > 0
    torch.manual_seed(0)
    q, (k, v) = torch.randn(75, 4, 64).half(), torch.randn(2, 9130, 2, 64).half()
    results = []
    for emulator.order in (0, 1, 7, 8):
        results.append(attention.run(q, (k, v)).clone())
    assert all(torch.equal(results[0], again) for again in results[1:])
