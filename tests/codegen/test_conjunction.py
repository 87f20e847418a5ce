"""Masks in the form that leaves an element few tests say what they said before."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mask_grammar import Grammar, elements, masks, random_inputs, random_tiles

import warploom as wl
from warploom.codegen.lowering.conjunction import few_tests
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.logits_hooks import column_state_bytes
from warploom.dsl.values.position import Position
from warploom.dsl.variants.trace import trace

BOUNDS = tuple(
    (op, ("at", "kv_pos"), limit)
    for op in ("<", "<=", ">", ">=")
    for limit in (("at", "q_pos"), ("field", "a"), ("per_query_head",))
)
# Bounds of a key on either side, so that most have others to join.
bounds = st.sampled_from(BOUNDS).flatmap(
    lambda found: st.sampled_from((found, (found[0], found[2], found[1])))
)


@settings(max_examples=200, deadline=None)
@given(
    conditions=st.lists(st.one_of(bounds, masks), min_size=2, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_mask_is_the_same(conditions: list[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = conditions[0]
    for condition in conditions[1:]:
        tree = ("&", tree, condition)
    inputs, tiles = random_inputs(rng), random_tiles(rng, 4)
    mask = trace(Grammar(tree)).hooks["logits_mask"]
    for i in range(4):
        expected = elements(mask, inputs, tiles, i)
        np.testing.assert_array_equal(elements(few_tests(mask), inputs, tiles, i), expected)


def element_test(variant: wl.Variant) -> str:
    return variant_struct(trace(variant), "cuda").split("bool mask(")[1].split("}")[0]


def test_bounds_of_one_number_join() -> None:
    text = element_test(wl.Causal() & wl.SlidingWindow(9, sinks=0))
    assert "return (kv_pos <= rs.r0) & ((kv_pos >= rs.r1) | (kv_pos < rs.r2));" in text


def test_what_is_known_of_a_column_is_one_truth() -> None:
    class Apart(wl.Variant):
        kept = wl.Tensor("bool", ("kv_pos",))
        few = wl.Scalar("int32")

        def logits_mask(self, at: Position) -> Any:
            near = at.q_pos > at.kv_pos
            return self.kept[at.kv_pos] & near & ~self.kept[at.kv_pos + 1] & (at.q_pos > self.few)

    traced = trace(Apart())
    assert column_state_bytes(traced) == 4
    assert "return ((rs.r0 != 0) & (kv_pos < row.q_pos)) & (cs.c0 != 0);" in element_test(Apart())
