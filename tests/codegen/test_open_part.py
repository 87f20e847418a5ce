"""What is left of a mask in a tile where intervals decide the rest of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mask_grammar import Grammar, elements, masks, random_inputs, random_tiles

import warploom as wl
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.logits_hooks import column_state_bytes
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.masks.open_part import mask_parts
from warploom.dsl.values.evaluate import evaluate
from warploom.dsl.values.position import Position
from warploom.dsl.variants.trace import trace

READS = ("<", ("table", ("at", "kv_pos")), ("const", 5))  # no interval knows


@settings(max_examples=200, deadline=None)
@given(tree=masks, op=st.sampled_from(("&", "|")), seed=st.integers(0, 2**32 - 1))
def test_the_parts_are_the_mask_and_the_open_one_all_of_it_where_it_is_said(
    tree: Any, op: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    inputs, tiles = random_inputs(rng), random_tiles(rng, 12)
    traced = trace(Grammar(("&", (op, tree, READS), READS)))
    mask = traced.hooks["logits_mask"]
    tensors = {name: v for name, v in inputs.items() if isinstance(v, np.ndarray)}
    parts = mask_parts(mask, frozenset(tensors))
    assert parts is not None
    (hides,) = TileAnalysis(traced, inputs, tensors)._run((parts.decided_may_hide,), tiles)
    for i, may_hide in enumerate(hides):
        seen = elements(mask, inputs, tiles, i)
        left_open = elements(parts.open, inputs, tiles, i)
        assert (seen == (elements(parts.decided, inputs, tiles, i) & left_open)).all()
        assert may_hide or (seen == left_open).all()


class Reads(wl.Variant):
    kept = wl.Tensor("bool", ("kv_pos",))
    documents = wl.Tensor("int32", (None,))

    def logits_mask(self, at: Position) -> Any:
        same = self.documents[at.q_row] == self.documents[at.kv_pos]
        return self.kept[at.kv_pos] & same


@pytest.mark.parametrize("variant", [wl.Causal(), Reads(), wl.Causal() & wl.SlidingWindow(9)])
def test_a_mask_all_decided_or_all_open_has_no_parts(variant: wl.Variant) -> None:
    traced = trace(variant)
    names = frozenset(field.name for field in traced.tensors)
    assert mask_parts(traced.hooks["logits_mask"], names) is None
    assert "kMaskHasParts" not in variant_struct(traced, "cuda")


def test_open_parts_test_what_states_keep() -> None:
    traced = trace(wl.Causal() & Reads())
    text = variant_struct(traced, "cuda")
    assert "return (cs.c0 != 0) & (rs.r0 == cs.c1);" in text
    assert "kv_pos_last > q_pos_first" in text.split("bool decided_may_hide")[1]
    assert column_state_bytes(traced) == 8


def test_tiles_below_the_diagonal_are_left_open() -> None:
    traced = trace(wl.Causal() & Reads())
    parts = mask_parts(traced.hooks["logits_mask"], frozenset(("kept", "documents")))
    assert parts is not None
    corners = {"q_pos_first": 8, "q_pos_last": 11, "kv_pos_first": 0}
    for last_key, may_hide in ((7, False), (8, False), (9, True)):
        positions = {**corners, "kv_pos_last": last_key}
        arrays = {name: np.asarray(value) for name, value in positions.items()}
        assert evaluate((parts.decided_may_hide,), arrays, {}, {}, wide=True)[0] == may_hide
