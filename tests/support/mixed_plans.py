"""Mixed batches, and what to plan them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from support.problems import plan_of, problem_of
from warploom.scheduler.model.cost import PIECE
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.visibility import AllVisible
from warploom.scheduler.plans.plan import Plan

DECODE = Role("decode", 12, 64)
# Rows by keys of the larger tile, and the other roles: keys that are more, fewer or no multiple.
SHAPES = [
    (48, 64, (DECODE,)),
    (48, 128, (Role("decode", 4, 32),)),
    (16, 32, (Role("decode", 1, 128),)),
    (128, 128, (Role("decode", 16, 128),)),
]
# What a unit of the cost models costs, and how many CTAs saturate memory.
PRICES = RolePrices((160, 30), 10)
# How prefills are planned, unless all are cut at fixed multiples: on a line, or dealt if that pays.
ON_A_LINE: dict[str, Any] = {"may_deal": False}
DEALT: dict[str, Any] = {"piece_keys": PIECE}


@dataclass(frozen=True)
class Mixed:
    """A batch, and what to plan it with."""

    segments: Any
    visibility: Any
    left: int
    numbers: dict[str, Any]
    sm_limit: int | None
    prices: RolePrices = PRICES
    ways: dict[str, Any] = field(default_factory=lambda: ON_A_LINE)

    def plan(self, **changes: Any) -> Plan:
        ways = {} if "split_size" in changes else self.ways
        return plan_of(self.segments, **(self._arguments | ways | changes))

    def problem(self) -> Problem:
        return problem_of(self.segments, **self._arguments, **self.ways)

    @property
    def _arguments(self) -> dict[str, Any]:
        given = {"visibility": self.visibility, "sm_limit": self.sm_limit, "prices": self.prices}
        return given | self.numbers


def near(sizes: list[int], most: int) -> st.SearchStrategy[int]:
    """Lengths of 0 and 1, around multiples of these sizes, and any."""
    borders = {size * n + d for size in sizes for n in (1, 2, 3) for d in (-1, 0, 1)}
    known = sorted({0, 1, *(x for x in borders if 0 <= x <= most)})
    return st.one_of(st.sampled_from(known), st.integers(0, most))


@st.composite
def mixed(draw: Any, kit: Any) -> Mixed:
    rows, keys, smaller = draw(st.sampled_from(SHAPES))
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 12, 32]))
    tiles = [(rows, keys), *((role.rows, role.keys) for role in smaller)]
    sizes = [max(r // group, 1) for r, _ in draw(st.sampled_from([tiles, tiles[:1], tiles[1:]]))]
    longest = draw(st.sampled_from([150, 1500, min(sizes)]))  # the last: decodes alone, perhaps
    q_lens = draw(st.lists(near(sizes, longest), max_size=7))
    most = draw(st.sampled_from([200, 3000]))
    kv = near([k for _, k in tiles], most)
    kv_lens = [draw(kv) for _ in q_lens]
    segments = kit.make_segments(q_lens, kv_lens)
    left = draw(st.sampled_from([-1, 0, 40, 2**40]))  # -1: no mask
    mask = AllVisible(segments) if left < 0 else kit.window(segments, group, left)
    numbers = {
        "rows": rows, "keys": keys, "smaller": smaller, "group_size": group,
        "num_kv_heads": draw(st.sampled_from([1, 2, 3])),
        "num_ctas": draw(st.one_of(st.just(1), st.integers(1, 40), st.integers(35, 150))),
    }  # fmt: skip
    ways = draw(st.sampled_from([ON_A_LINE, DEALT]))
    limit = draw(st.one_of(st.none(), st.integers(1, 50)))
    price = st.one_of(st.just(1), st.integers(1, 2_000_000))
    claim = draw(st.sampled_from([1, 1, 200]))  # short lists are worth it, so that there are some
    cached = draw(st.sampled_from([None, 1, 1, 4000]))
    units, cut = (draw(price), draw(price)), draw(st.sampled_from([1, 1, 400, 4096]))
    prices = RolePrices(units, draw(st.integers(1, 60)), claim, cached, cut, draw(st.booleans()))
    return Mixed(segments, mask, left, numbers, limit, prices, ways)


def busy(kit: Any, limit: int | None = None) -> Mixed:
    """One chunk of a long prompt and many decodes, of which some are cut."""
    segments = kit.make_segments([700, *[1] * 30, 3], [6000, *[9000] * 31])
    numbers = {
        "rows": 48, "keys": 128, "smaller": (DECODE,), "group_size": 4, "num_kv_heads": 2,
        "num_ctas": 64,
    }  # fmt: skip
    return Mixed(segments, kit.window(segments, 4), 2**40, numbers, limit)
