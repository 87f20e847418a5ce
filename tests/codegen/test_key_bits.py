"""Masks of bounds say what they said before, and are found in whatever form users write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.mask_grammar import Grammar, elements, masks, random_inputs, random_tiles

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.lowering.conjunction import few_tests
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.key_bits import of_bounds, shows_runs
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs

KEY, QUERY = ("at", "kv_pos"), ("at", "q_pos")
LIMITS = st.sampled_from(
    [
        QUERY,
        ("field", "a"),
        ("per_batch",),
        ("const", 3),
        ("+", QUERY, ("field", "b")),
        ("far", QUERY),
    ]
)
SIDES = st.sampled_from(
    [KEY, ("neg", KEY), ("-", QUERY, KEY), ("-", KEY, ("at", "kv_len")), ("+", KEY, QUERY)]
)
BOUNDS = st.tuples(st.sampled_from(("<", "<=", ">", ">=")), SIDES, LIMITS)
TURNED = BOUNDS.map(lambda found: (found[0], found[2], found[1]))
OF_ROWS = st.just((">", QUERY, ("field", "a")))
TREES = st.recursive(
    st.one_of(BOUNDS, TURNED, OF_ROWS),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("&", "|")), inner, inner), st.tuples(st.just("~"), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(tree=st.one_of(TREES, TREES, masks), seed=st.integers(0, 2**32 - 1))
@example(tree=("<=", ("-", QUERY, KEY), ("field", "a")), seed=0)
def test_the_mask_is_the_same(tree: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, tiles = random_inputs(rng), random_tiles(rng, 4)
    mask = few_tests(trace(Grammar(tree)).hooks["logits_mask"])
    made = of_bounds(mask)
    if made is None:
        return
    for i in range(4):
        found = (elements(root, inputs, tiles, i) for root in (made, mask))
        first, second = np.broadcast_arrays(*found)  # positions may cancel
        np.testing.assert_array_equal(first, second)


@settings(max_examples=100, deadline=None)
@given(tree=TREES)
def test_trees_of_bounds_are_found(tree: Any) -> None:
    assert of_bounds(few_tests(trace(Grammar(tree)).hooks["logits_mask"])) is not None


class Reaches(wl.Variant):
    """Windows by head, and only for rows behind a position."""

    reach = wl.Tensor("int32", ("q_head",))
    start = wl.Scalar("int32")

    def logits_mask(self, at: Position) -> Any:
        return (at.q_pos - at.kv_pos <= self.reach[at.q_head]) & (at.q_pos >= self.start)


class Begins(wl.Variant):
    """Rows see no key before their document, of which nobody knows where it begins."""

    first = wl.Tensor("int32", ("q_row",))

    def logits_mask(self, at: Position) -> Any:
        return (at.kv_pos >= self.first[at.q_row]) & (at.kv_pos <= at.q_pos)


class Even(wl.Variant):
    def logits_mask(self, at: Position) -> Any:
        return at.kv_pos % 2 == 0


@pytest.mark.parametrize(
    ("variant", "is_found", "is_run"),
    [
        (wl.Causal(), True, True),
        (wl.Causal() & wl.SlidingWindow(9), True, True),
        (wl.flex(mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 64)), True, True),
        (Reaches(), True, True),
        (Begins(), True, True),
        (wl.Causal() & wl.SlidingWindow(9, sinks=1), True, False),
        (wl.PrefixLM(), True, False),
        (wl.flex(mask_mod=lambda b, h, q, k: ~(k > q)), True, True),
        (wl.DocumentMask() & wl.Causal(), False, False),
        (Even() & wl.Causal(), False, False),
    ],
    ids=lambda value: value.name if isinstance(value, wl.Variant) else "",
)
def test_which_masks_are_of_bounds(variant: wl.Variant, is_found: bool, is_run: bool) -> None:
    found = of_bounds(few_tests(trace(variant).hooks["logits_mask"]))
    assert (found is not None) is is_found
    text = variant_struct(trace(variant), "cuda", joins_keys=True)
    assert ("kMaskIsOfBounds" in text) is is_found
    assert ("kMaskShowsRuns" in text) is is_run
    if found is not None:
        assert shows_runs(found) is is_run


def test_vectors_of_a_cpu_and_tall_warps_are_tested_key_by_key() -> None:
    causal = AttentionSpec(trace(wl.Causal()), 64, 64, dtype("float16"), wl.Ragged())
    tiles = TileConfig(64, 64, 4, 2), TileConfig(128, 64, 4, 2), TileConfig(16, 64, 2, 2)
    joined = ["key_bits" in render_cuda(causal, tile, c_structs()).code for tile in tiles]
    assert joined == [True, False, True]
    assert "kMaskIsOfBounds" not in variant_struct(trace(wl.Causal()), "cpp")
