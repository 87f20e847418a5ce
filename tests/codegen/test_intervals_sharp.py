"""Tile analysis is exact for the masks people use: no tile is PARTIAL without need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warploom.dsl.masks.intervals import FULL, PARTIAL, SKIP, TileAnalysis
from warploom.dsl.values.functions import where
from warploom.dsl.values.position import Position
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import MissingInput

LENGTH = 40


class Rule(Variant):
    """A mask given as a function of the variant and the position."""

    window = Scalar("int32", default=6)
    limit = Scalar("float32", default=12.5)
    prefix = Tensor("int32", ("batch",))
    window_of = Tensor("int32", ("kv_head",))
    window_of_query = Tensor("int32", ("q_head",))
    streams = Tensor("bool", ("q_head",))

    def __init__(self, rule: Callable[[Rule, Position], Any]) -> None:
        super().__init__()
        self.rule = rule

    def logits_mask(self, at: Position) -> Any:
        return self.rule(self, at)


# name: rule, whether classes are exact, whether bounds are
RULES: dict[str, tuple[Callable[[Any, Position], Any], bool, bool]] = {
    "causal": (lambda v, at: at.kv_pos <= at.q_pos, True, True),
    "not later": (lambda v, at: ~(at.q_pos < at.kv_pos), True, True),
    "distance": (lambda v, at: at.q_pos - at.kv_pos >= 0, True, True),
    "band": (
        lambda v, at: (at.kv_pos <= at.q_pos) & (at.kv_pos > at.q_pos - v.window),
        True,
        True,
    ),
    "prefix": (
        lambda v, at: (at.kv_pos <= at.q_pos) | (at.kv_pos < v.prefix[at.batch]),
        True,
        True,
    ),
    "window of head": (lambda v, at: at.q_pos - at.kv_pos <= v.window_of[at.kv_head], True, True),
    "window of query head": (
        lambda v, at: (at.q_pos - at.kv_pos <= v.window_of_query[at.q_head]) & (at.q_pos < 90),
        True,
        True,
    ),
    "some query heads": (lambda v, at: v.streams[at.q_head] | (at.kv_pos == 90), True, True),
    "chunks": (lambda v, at: at.kv_pos // 8 == at.q_pos // 8, True, True),
    "earlier chunks": (lambda v, at: (at.kv_pos + 3) // 4 < at.q_pos // 4, True, True),
    "half": (lambda v, at: 2 * at.kv_pos <= at.q_pos, True, True),
    "third": (lambda v, at: 3 * at.kv_pos - 1 > at.q_pos, True, True),
    "mirrored": (lambda v, at: at.kv_len - at.kv_pos * 2 >= at.q_pos, True, True),
    "cancelling": (lambda v, at: at.q_pos + at.kv_len >= at.kv_pos + at.kv_len, True, True),
    "offset that might wrap": (lambda v, at: at.kv_pos + v.window <= at.q_pos, True, True),
    "rows of request": (lambda v, at: at.q_idx >= 5, True, True),
    "float limit": (lambda v, at: at.kv_pos < v.limit, True, False),
    "stripes": (lambda v, at: at.kv_pos % 8 < 4, False, False),
    "chosen": (lambda v, at: where(at.kv_len > 20, at.kv_pos <= at.q_pos, True), True, True),
    "two pieces of a sequence": (
        lambda v, at: (
            where(at.kv_pos < v.prefix[at.batch], at.kv_pos + 2, at.kv_pos + 9) <= at.q_pos
        ),
        True,
        True,
    ),
    "pieces in reverse": (
        lambda v, at: at.q_pos - where(at.kv_pos >= 7, at.kv_pos - 7, at.kv_pos + 20) < v.window,
        False,
        True,
    ),
    "same": (lambda v, at: at.kv_pos == at.q_pos, True, True),
    "others": (lambda v, at: at.kv_pos != at.q_pos, True, False),
    "nothing": (lambda v, at: at.kv_pos < 0, True, True),
}


def boxes(rng: np.random.Generator, count: int) -> dict[str, Any]:
    kv_len = rng.integers(1, LENGTH, count)
    q_len = (rng.random(count) * kv_len).astype(int) + 1
    first_q = kv_len - q_len + (rng.random(count) * q_len).astype(int)
    last_q = first_q + (rng.random(count) ** 2 * (kv_len - first_q)).astype(int)
    first_k = (rng.random(count) * kv_len).astype(int)
    last_k = first_k + (rng.random(count) ** 2 * (kv_len - first_k)).astype(int)
    kv_head = rng.integers(0, 2, count)
    return {
        "batch": rng.integers(0, 3, count),
        "kv_head": kv_head,
        "q_len": q_len,
        "kv_len": kv_len,
        "num_q_heads": np.full(count, 4),
        "num_kv_heads": np.full(count, 2),
        "q_pos": (first_q, last_q + 1),
        "kv_pos": (first_k, last_k + 1),
        "q_head": (2 * kv_head, 2 * kv_head + 2),
    }


TENSORS = {
    "prefix": np.array([0, 7, 30]),
    "window_of": np.array([4, 11]),
    "window_of_query": np.array([9, 2, 5, 5]),
    "streams": np.array([False, False, True, False]),
}


@pytest.mark.parametrize("name", RULES)
def test_classes_and_bounds_are_exact(name: str, mask_elements: Callable[..., Any]) -> None:
    rule, exact_class, exact_bounds = RULES[name]
    variant, tiles = Rule(rule), boxes(np.random.default_rng(0), 300)
    analysis = TileAnalysis(trace(variant), {}, TENSORS)
    classes = analysis.classify(**tiles)
    begins, ends = analysis.kv_bounds(**{k: v for k, v in tiles.items() if k != "kv_pos"})
    for i, found in enumerate(classes):
        seen = mask_elements(variant, TENSORS, tiles, i)
        tile = seen[:, :, tiles["kv_pos"][0][i] : tiles["kv_pos"][1][i]]
        exact = FULL if tile.all() else PARTIAL if tile.any() else SKIP
        assert found in ((exact,) if exact_class else (exact, PARTIAL))
        keys = np.flatnonzero(seen.any(axis=(0, 1)))
        hull = (keys[0], keys[-1] + 1) if len(keys) else (begins[i], begins[i])
        if exact_bounds:
            assert (begins[i], ends[i]) == hull
        else:
            assert begins[i] <= hull[0] and hull[1] <= ends[i]


def test_unknown_tensors_leave_tiles_partial() -> None:
    traced = trace(Rule(RULES["prefix"][0]))
    tile = boxes(np.random.default_rng(0), 1)
    tile |= {"kv_len": [20], "q_len": [20], "q_pos": ([0], [4]), "kv_pos": ([8], [16])}
    assert TileAnalysis(traced, {}, TENSORS).classify(**tile | {"batch": [0]}) == [SKIP]
    assert TileAnalysis(traced, {}, TENSORS).classify(**tile | {"batch": [2]}) == [FULL]
    assert TileAnalysis(traced, {}).classify(**tile) == [PARTIAL]


def test_a_tile_of_very_many_heads_is_partial() -> None:
    tile = {
        key: value[:1] for key, value in boxes(np.random.default_rng(0), 1).items() if key != "x"
    }
    tile |= {"kv_len": [20], "q_len": [20], "q_pos": ([10], [12]), "kv_pos": ([0], [4])}
    windows = {"window_of_query": np.full(12, 3)}
    analysis = TileAnalysis(trace(Rule(RULES["window of query head"][0])), {}, windows)
    assert analysis.classify(**tile | {"q_head": ([0], [8])}) == [SKIP]
    assert analysis.classify(**tile | {"q_head": ([0], [12])}) == [PARTIAL]


def test_scalars_of_the_mask_are_named_and_asked_for() -> None:
    class Windowed(Variant):
        window = Scalar("int32")
        cap = Scalar("float32")

        def logits_mask(self, at: Position) -> Any:
            return at.kv_pos > at.q_pos - self.window

        def logits_transform(self, logits: Any, at: Position) -> Any:
            return logits * self.cap

    assert TileAnalysis(trace(Windowed()), {"window": 3}).mask_scalars == {"window"}
    with pytest.raises(MissingInput, match="window"):
        TileAnalysis(trace(Windowed()), {"cap": 1.0})


def test_no_mask_is_full() -> None:
    tiles = boxes(np.random.default_rng(1), 5)
    analysis = TileAnalysis(trace(Variant()), {})
    assert (analysis.classify(**tiles) == FULL).all()
    begins, ends = analysis.kv_bounds(**{k: v for k, v in tiles.items() if k != "kv_pos"})
    assert (begins == 0).all() and (ends == tiles["kv_len"]).all()


def test_bounds_of_an_empty_sequence_are_empty() -> None:
    tile = {key: v for key, v in boxes(np.random.default_rng(1), 1).items() if key != "kv_pos"}
    tile |= {"kv_len": [0], "q_pos": ([-3], [0])}
    for rule in (RULES["causal"][0], RULES["band"][0], RULES["stripes"][0]):
        begin, end = TileAnalysis(trace(Rule(rule)), {}, TENSORS).kv_bounds(**tile)
        assert begin == end == 0


def test_a_hash_that_wraps_leaves_the_other_conditions_sharp() -> None:
    def rule(variant: Rule, at: Position) -> Any:
        return (at.kv_pos <= at.q_pos) & (at.kv_pos * 1103515245 * 48271 % 100 < 60)

    analysis = TileAnalysis(trace(Rule(rule)), {})
    one = np.ones(2, int)
    place = {"batch": 0 * one, "kv_head": 0 * one, "num_q_heads": one, "num_kv_heads": one}
    place |= {"q_len": 4096 * one, "kv_len": 4096 * one, "q_head": (0 * one, one)}
    queries = np.array([1024, 2048]), np.array([1088, 2112])
    classes = analysis.classify(**place, q_pos=queries, kv_pos=(2000 * one, 2048 * one))
    assert classes.tolist() == [SKIP, PARTIAL]
    begins, ends = analysis.kv_bounds(**place, q_pos=queries)
    assert begins.tolist() == [0, 0] and ends.tolist() == [1088, 2112]
