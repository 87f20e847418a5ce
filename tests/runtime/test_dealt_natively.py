"""Prefills of plans of two roles that a native planner deals as NumPy does, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support.native_plans import Planners, check_equal

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.site import LongestFirst, Site
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.plans.capacity import capacity


@pytest.mark.parametrize("decodes", [0, 4, 70])
@pytest.mark.parametrize("chunks", [[(720, 6000)], [(2400, 6000)], [(500, 9000), (90, 700)]])
@pytest.mark.parametrize(
    ("ctas", "may_deal"), [(1, True), (40, True), (100, True), (528, True), (100, False)]
)
def test_prefills_are_dealt_alike(
    chunks: list[tuple[int, int]], decodes: int, ctas: int, may_deal: bool
) -> None:
    """What CTAs leave are pieces, whole ones, or nothing."""
    heads, tile = Heads(8, 2), TileConfig(64, 64, decode=TileConfig(16, 32))
    q_lens, kv_lens = zip(*chunks, *[(1, 9000)] * decodes, strict=True)
    ends = [np.append(0, np.cumsum(lens)).astype(np.int32) for lens in (q_lens, kv_lens)]
    prices = RolePrices((1800, 60), 70, cached_keys=5000, may_deal_beside_decodes=may_deal)
    room = capacity(
        Bounds(len(q_lens), sum(q_lens), 9000), rows=64, keys=64, num_kv_heads=2, group_size=4,
        num_ctas=ctas, smaller=smaller_roles(tile),
    )  # fmt: skip
    inputs = SimpleNamespace(scalars={}, known={})
    longest_first = LongestFirst(384, 5000)
    planners = Planners("causal", wl.Ragged(), heads, inputs, True, longest_first)
    site = Site.of(wl.Ragged(), heads, tile, room, ctas, prices, longest_first)
    check_equal(planners, (*ends, None, None), tile, site, prices)
