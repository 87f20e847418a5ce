"""The parts of generative recommendation, each beside an oracle in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom import errors
from warploom import recommendation_errors as refusals
from warploom.recommendation import (
    BeamPages,
    BeamSearch,
    ItemMask,
    ItemTable,
    TopK,
    heap_top_k,
    sorted_top_k,
)
from warploom.serving.recommendation import top_k

VOCAB = 7


def full_sort(table: np.ndarray[Any, Any], count: int) -> list[tuple[float, int, int]]:
    found = [(-v, b, r) for b, row in enumerate(table.tolist()) for r, v in enumerate(row)]
    return [(-v, b, r) for v, b, r in sorted(found)[:count]]


@pytest.mark.parametrize("few", [0, 4096], ids=["walk", "sort"])
@pytest.mark.parametrize("select", [sorted_top_k, heap_top_k])
def test_the_best_are_those_of_a_full_sort(
    select: Callable[[Any, int], TopK], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "_FEW", few)

    @settings(max_examples=40)
    @given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**32 - 1))
    def check(beams: int, width: int, levels: int, seed: int) -> None:
        rng = np.random.default_rng(seed)  # few levels: many ties
        table = -np.sort(rng.integers(0, levels, (beams, width)), axis=1).astype(np.float32)
        table[table < -0.8 * levels] = -np.inf
        count = int(rng.integers(1, table.size + 1))
        top = select(table, count)
        got = list(zip(top.scores.tolist(), top.beams.tolist(), top.ranks.tolist(), strict=True))
        assert got == full_sort(table, count)
        assert count <= top.seen <= table.size

    check()


@pytest.mark.parametrize("select", [sorted_top_k, heap_top_k])
def test_most_candidates_are_passed_over(select: Callable[[Any, int], TopK]) -> None:
    rng = np.random.default_rng(0)
    table = -np.sort(rng.exponential(size=(256, 256)), axis=1) + rng.normal(size=(256, 1))
    top = select(table, 256)
    assert top.scores.tolist() == np.sort(table.ravel())[::-1][:256].tolist()
    assert top.seen < table.size / 8


@pytest.mark.parametrize(
    ("scores", "count", "error"),
    [
        (np.zeros(3), 1, errors.WrongShape),
        (np.zeros((2, 3), int), 1, errors.WrongDType),
        (np.zeros((2, 3)), 7, refusals.TooFewCandidates),
        (np.zeros((2, 3)), 0, errors.ArgumentError),
        (np.full((2, 3), np.nan), 1, errors.ArgumentError),
    ],
)
def test_candidates_that_cannot_be_sorted_are_refused(
    scores: Any, count: int, error: type[Exception]
) -> None:
    for select in (sorted_top_k, heap_top_k):
        with pytest.raises(error):
            select(scores, count)


@pytest.mark.parametrize("few", [0, 4096], ids=["walk", "sort"])
@pytest.mark.parametrize("select", [sorted_top_k, heap_top_k])
def test_candidates_in_another_order_are_refused(
    select: Callable[..., TopK], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "_FEW", few)
    with pytest.raises(refusals.Unsorted, match=r"beam 1 rise from 0\.0 to 5\.0"):
        select(np.array([[2.0, 2.0, 1.0], [3.0, 0.0, 5.0]]), 2)
    ends = np.array([[2.0, -np.inf, np.nan], [1.0, -np.inf, -np.inf]])
    assert select(ends, 2).scores.tolist() == [2.0, 1.0]
    assert select(-np.sort(-ends[:, :2]), 2, assume_sorted=True).beams.tolist() == [0, 1]


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, VOCAB - 1)] * 3), min_size=1, max_size=60))
def test_a_table_has_the_given_items_and_no_others(given_items: list[tuple[int, ...]]) -> None:
    table = ItemTable(np.array(given_items), VOCAB)
    mask = ItemMask(table, len(given_items))
    assert len(table) == len(set(given_items))
    begins: list[tuple[int, ...]] = [()]
    nodes = np.zeros(1, np.int64)
    for level in range(3):
        found = mask.write(level, nodes)
        following: list[tuple[int, ...]] = []
        parents: list[int] = []
        for beam, begin in enumerate(begins):
            tokens = sorted({i[level] for i in given_items if i[:level] == begin})
            expected = torch.full((VOCAB,), -torch.inf)
            expected[tokens] = 0.0
            assert torch.equal(found[beam], expected)
            following += [(*begin, token) for token in tokens]
            parents += [beam] * len(tokens)
        order = np.random.default_rng(level).permutation(len(parents))
        begins = [following[i] for i in order]
        nodes = table.advance(level, nodes[np.array(parents)[order]], [b[-1] for b in begins])
    numbers, rows = table.items(nodes)
    assert [tuple(row) for row in rows.tolist()] == begins
    assert numbers.tolist() == [given_items.index(b) for b in begins]


def test_items_that_do_not_exist_are_refused() -> None:
    table = ItemTable([[1, 2], [1, 3]], VOCAB)
    with pytest.raises(refusals.NoValidItem, match="beam 1 took token 2"):
        table.advance(0, [0, 0], [1, 2])
    with pytest.raises(errors.IndexOutOfRange):
        table.children(1, [1])
    with pytest.raises(refusals.SearchDone):
        table.children(2, [0])
    with pytest.raises(errors.WrongShape):
        table.advance(0, [0], [1, 1])
    with pytest.raises(refusals.WidthChanged):
        ItemMask(table, 1).write(0, [0, 0])
    for wrong in ([[1, VOCAB]], [[-1, 0]], [[0.5, 1.0]], [1, 2]):
        with pytest.raises(refusals.BadItems):
            ItemTable(wrong, VOCAB)
    with pytest.raises(refusals.NoValidItem):
        ItemTable(np.zeros((0, 3), int), VOCAB)
    with pytest.raises(
        refusals.BadItems, match=r"items\[0\] has 2, and items\[1\] has 1\. Expected"
    ):
        ItemTable([[1, 2], [3]], VOCAB)
    for no_array in (None, "12", {1, 2}):
        with pytest.raises(errors.ArgumentError, match="items: "):
            ItemTable(no_array, VOCAB)


@settings(max_examples=40)
@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    prefix_len=st.integers(1, 40),
    width=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_beam_reads_its_own_tokens(
    page_size: int, prefix_len: int, width: int, seed: int
) -> None:
    """A cache that holds names of tokens in place of keys, so that a mix-up is seen."""
    rng, steps = np.random.default_rng(seed), 6
    prefix_pages = -(-prefix_len // page_size)
    own = BeamPages.pages_needed(width, steps, prefix_len, page_size)
    order = rng.permutation(prefix_pages + own)
    prefix, rest = order[:prefix_pages], order[prefix_pages:]
    cache = torch.full((len(order), page_size), -1)
    for i in range(prefix_len):
        cache[prefix[i // page_size], i % page_size] = i
    before = cache[torch.from_numpy(prefix)].clone()
    pages = BeamPages(prefix, prefix_len, rest, page_size=page_size, width=width)
    histories = [list(range(prefix_len))]
    for step in range(steps):
        parents = rng.integers(0, len(histories), int(rng.integers(1, width + 1)))
        copies = pages.advance(parents)
        assert len(copies.source) <= len(parents) and not (page_size == 1 and len(copies.source))
        assert not set(copies.source.tolist()) & set(copies.target.tolist())
        copies.apply(cache)
        tables = pages.tables()
        histories = [[*histories[p], 1000 * (step + 1) + i] for i, p in enumerate(parents)]
        assert len(pages) == len(histories) and pages.length == len(histories[0])
        listed = tables["kv_indices"].reshape(len(histories), -1)
        for beam, history in enumerate(histories):
            cache[listed[beam, -1], tables["last_page_len"][beam] - 1] = history[-1]
        for beam, history in enumerate(histories):
            read = cache[torch.from_numpy(listed[beam]).long()].ravel()
            assert read[: len(history)].tolist() == history
    assert torch.equal(cache[torch.from_numpy(prefix)], before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool])
def test_pages_of_one_byte_numbers_are_copied(dtype: torch.dtype) -> None:
    pages = BeamPages([0], 1, [1, 2], page_size=2, width=2)
    cache = torch.tensor([[1, 0], [0, 0], [0, 0]]).to(dtype)
    pages.advance([0, 0]).apply(cache)
    assert cache.float().tolist() == [[1, 0]] * 3


def test_keys_and_values_apart_are_copied_as_a_pair() -> None:
    copies = BeamPages([0], 1, [1, 2], page_size=2, width=2).advance([0, 0])
    k, v = torch.eye(3)[:, :2, None].clone(), torch.ones(3, 1, 2).cumsum(0)
    copies.apply((k, v), [v.clone()])
    assert torch.equal(k, torch.eye(3)[:1, :2, None].expand(3, 2, 1))
    assert torch.equal(v, torch.ones(3, 1, 2))


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        (torch.zeros(9, 2, 16, 2, 64), "pages of 4 tokens"),
        (torch.zeros(9), "pages of 4 tokens"),
        (torch.zeros(3, 4, 2), "more than 3 pages"),
        ((torch.ones(9, 4), torch.zeros(3, 4)), r"caches\[2\].*more than 3 pages"),
        (np.zeros((9, 4)), "of type ndarray; expected a tensor"),
    ],
    ids=["page size", "no tokens", "pages", "values", "array"],
)
def test_caches_that_are_none_of_the_beams_are_left_alone(cache: Any, told: str) -> None:
    copies = BeamPages([0], 3, [1, 2, 3], page_size=4, width=3).advance([0, 0, 0])
    fits = torch.arange(36.0).view(9, 4)
    with pytest.raises(errors.ArgumentError, match=told):
        copies.apply(fits, cache)
    assert torch.equal(fits, torch.arange(36.0).view(9, 4))


def test_pages_that_do_not_suffice_change_nothing() -> None:
    pages = BeamPages([0, 1], 6, [2, 3, 4], page_size=4, width=4)
    before = pages.tables()
    with pytest.raises(refusals.TooFewPages, match="need 4 more pages, and 3 of their 3"):
        pages.advance([0] * 4)
    assert pages.length == 6
    assert all(np.array_equal(before[name], value) for name, value in pages.tables().items())
    assert pages.advance([0, 0, 0]).target.tolist() == [2, 3, 4]
    with pytest.raises(refusals.BadParent, match=r"parents\[1\] is 3"):
        pages.advance([0, 3])
    for wrong in ([], [0] * 5, [[0]]):
        with pytest.raises(errors.WrongShape):
            pages.advance(wrong)
    with pytest.raises(errors.ArgumentError):
        pages.advance([0.0])
    with pytest.raises(errors.WrongShape):
        BeamPages([0], 6, [2], page_size=4, width=1)
    with pytest.raises(errors.ArgumentError):
        BeamPages([0, 1], 6, [1, 2], page_size=4, width=1)
    for prefix, own in ([2**32 + 5], [6]), ([5], [2**31]), (np.array([2**63], np.uint64), [6]):
        with pytest.raises(errors.ArgumentError, match="and 2147483647 is the last"):
            BeamPages(prefix, 16, own, page_size=16, width=1)
    last = BeamPages([2**31 - 1], 16, [6], page_size=16, width=1)
    assert last.tables()["kv_indices"].tolist() == [2**31 - 1]


def test_a_search_refuses_what_it_cannot_rank() -> None:
    table = ItemTable([[0, 1], [2, 3], [2, 4]], VOCAB)
    with pytest.raises(errors.ArgumentError, match=r"type ItemTable; expected ItemMask\("):
        BeamSearch(table, 4)  # type: ignore[arg-type]
    mask = ItemMask(table, 4)
    search = BeamSearch(mask, 4)
    with pytest.raises(errors.ArgumentError, match="type ndarray; expected a tensor"):
        search.step(np.zeros((1, VOCAB)))  # type: ignore[arg-type]
    with pytest.raises(refusals.SearchDone):
        search.results()
    with pytest.raises(refusals.WidthChanged):
        search.step(torch.zeros(2, VOCAB))
    with pytest.raises(errors.WrongShape):
        search.step(torch.zeros(1, VOCAB + 1))
    with pytest.raises(errors.WrongDType):
        search.step(torch.zeros(1, VOCAB, dtype=torch.int32))
    for value in (torch.nan, torch.inf):
        with pytest.raises(refusals.NoNumbers, match="beam 0"):
            search.step(torch.full((1, VOCAB), value))
    with pytest.raises(refusals.NoValidItem):
        search.step(torch.full((1, VOCAB), -torch.inf))
    assert search.step(torch.arange(VOCAB)[None].float()).tokens.tolist() == [2, 0]
    logits = -torch.arange(VOCAB).repeat(2, 1).float()
    logits[1, 1] = -torch.inf  # the second beam ends without an item
    assert search.step(logits).parents.tolist() == [0, 0]
    assert search.results().items.tolist() == [1, 2]
    with pytest.raises(refusals.SearchDone):
        search.step(logits)
    with pytest.raises(refusals.WidthChanged):
        BeamSearch(mask, 5)
