"""Assigning equals a priority queue; levelling keeps its bounds."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warploom.scheduler.model.constants import WORTH_SAVING
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.partition.balance import assign, level


def deal_with_heap(costs: list[int], num_ctas: int) -> tuple[list[int], list[tuple[int, int]]]:
    queue, taken = [(0, cta) for cta in range(num_ctas)], []
    for cost in costs:
        load, cta = heapq.heappop(queue)
        taken.append(cta)
        heapq.heappush(queue, (load + cost, cta))
    return taken, sorted(queue)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(0, 3000),
    num_ctas=st.integers(1, 264),
    giants=st.integers(0, 300),
    largest=st.sampled_from([1, 3, 50, 10_000]),
    ordered=st.booleans(),
)
def test_deal_equals_a_priority_queue(
    seed: int, size: int, num_ctas: int, giants: int, largest: int, ordered: bool
) -> None:
    """Giants first leave a few CTAs far behind, so rounds are short and the heap takes over."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, largest + 1, size)
    costs = np.concatenate(
        (np.full(giants, 100 * largest), np.sort(costs)[::-1] if ordered else costs)
    )
    cta, queue = assign(costs, num_ctas)
    taken, loads = deal_with_heap(costs.tolist(), num_ctas)
    assert cta.tolist() == taken
    assert [divmod(code, num_ctas) for code in queue.tolist()] == loads


@settings(max_examples=200, deadline=None)
@given(
    visible=st.lists(st.integers(0, 400), min_size=1, max_size=80),
    num_ctas=st.integers(1, 40),
    shape=st.sampled_from([(16, 32), (16, 64), (64, 128), (128, 64), (32, 64), (1, 32)]),
    piece=st.sampled_from([0, 100, 384]),
)
@example(visible=[50, 49, 11], num_ctas=2, shape=(16, 32), piece=100)  # 11 tiles give too few
def test_level_keeps_its_bounds(
    visible: list[int], num_ctas: int, shape: tuple[int, int], piece: int
) -> None:
    model = CostModel.of(*shape, piece)
    tiles = np.sort(np.array(visible, np.int64))[::-1]
    cost = model.of_chunks(tiles)
    mean = -(-int(cost.sum()) // num_ctas)
    cta, queue = assign(cost, num_ctas)
    last = np.zeros(num_ctas, np.int64)
    last[cta] = tiles
    moves = level(queue, last, mean, model)
    if moves is None:
        return
    owners = np.unique(moves.owner)
    takers = np.unique(moves.cta)
    assert not set(owners) & set(takers)
    assert len(moves.cta) <= len(owners) + len(takers) - 1
    assert len(moves.cta) + len(owners) <= 2 * num_ctas - 2
    assert np.all(moves.end - moves.begin >= model.grain)
    for owner in owners:
        mine = np.flatnonzero(moves.owner == owner)
        assert moves.begin[mine[0]] >= model.grain
        assert all(moves.end[a] == moves.begin[b] for a, b in pairwise(mine))
        assert moves.end[mine[-1]] == last[owner]
    # what partial results cost counts: to whom they go, and whose last tile they were cut from
    after = np.zeros(num_ctas, np.int64)
    after[queue % num_ctas] = queue // num_ctas
    gone = moves.end - moves.begin
    np.subtract.at(after, moves.owner, model.per_tile * gone)
    np.add.at(after, moves.cta, model.of_chunks(gone) + model.partial)
    after[owners] += model.partial
    largest = int(queue[-1] // num_ctas)
    assert after.max() <= largest - largest // WORTH_SAVING


@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (16, 64), (64, 32), (128, 128), (128, 64)])
def test_costs_are_small_integers_in_the_ratio_of_rows_to_keys(rows: int, keys: int) -> None:
    model = CostModel.of(rows, keys)
    assert model.fixed * keys == model.per_tile * rows
    assert np.gcd(model.fixed, model.per_tile) == 1
    assert model.grain * keys >= max(128, 2 * rows)
