"""`a & b`: masks and-ed, transforms in order, fields merged, clashes refused; in both readings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention, visible
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, ChainClash, WrongResult


class Shift(wl.Variant):
    shift = wl.Scalar("float32", default=1.0)

    def logits_transform(self, logits, at):
        return logits + self.shift


class Double(wl.Variant):
    def logits_transform(self, logits, at):
        return logits * 2.0

    def query_transform(self, q, at):
        return wl.rotate_half(q) + at.lane


class Even(wl.Variant):
    def logits_mask(self, at):
        return at.kv_pos % 2 == 0


def test_masks_are_anded() -> None:
    both = visible(Even() & wl.Causal(), q_len=5, kv_len=7)
    assert np.array_equal(
        both, visible(Even(), q_len=5, kv_len=7) & visible(wl.Causal(), q_len=5, kv_len=7)
    )
    assert list(trace(wl.Causal() & Shift()).hooks) == ["logits_transform", "logits_mask"]


def test_transforms_chain_from_left_to_right(graph) -> None:
    for order, expected in ((Shift() & Double(), 8.0), (Double() & Shift(), 7.0)):
        root = trace(order).hooks["logits_transform"]
        assert graph(root, {}, value=3.0, fields={"shift": 1.0}) == expected


def test_any_number_of_links_is_flattened() -> None:
    left = ((wl.Causal() & Shift()) & Double()) & Even()
    right = wl.Causal() & (Shift() & (Double() & Even()))
    assert trace(left) == trace(right)
    assert left.name == "Causal_Shift_Double_Even"
    assert repr(wl.Causal() & wl.SoftCap(3.0)) == "Causal() & SoftCap(cap=3.0)"


def test_fields_and_values_merge() -> None:
    both = wl.SoftCap(50.0) & wl.SlidingWindow(8) & Shift()
    assert both.inputs() == {"cap": 50.0, "left": 8, "right": -1}
    assert list(both.fields()) == ["cap", "left", "right", "shift"]
    traced = trace(both)
    assert [field.name for field in traced.scalars] == list(both.fields())


def test_the_oracle_reads_a_chain_link_by_link() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 8)), rng.normal(size=(5, 2, 8)), rng.normal(size=(5, 2, 8))
    chained, _ = reference_attention(Double() & Shift() & wl.Causal(), q, k, v)

    class ByHand(wl.Variant):
        def query_transform(self, q, at):
            return wl.rotate_half(q) + at.lane

        def logits_transform(self, logits, at):
            return logits * 2.0 + 1.0

        def logits_mask(self, at):
            return at.kv_pos <= at.q_pos

    np.testing.assert_allclose(chained, reference_attention(ByHand(), q, k, v)[0])


def test_a_field_clash_is_refused() -> None:
    with pytest.raises(ChainClash, match="SoftCap with SoftCap: both have a field 'cap'"):
        _ = wl.SoftCap(1.0) & wl.Causal() & wl.SoftCap(2.0)


def test_captured_tensors_of_one_name_must_be_one_tensor() -> None:
    def biased(bias: torch.Tensor) -> wl.Variant:
        return wl.flex(lambda score, b, h, q_idx, kv_idx: score + bias[h])

    slopes = torch.ones(4)
    assert list((biased(slopes) & biased(slopes)).fields()) == ["bias"]
    assert list((biased(slopes) & wl.Causal() & biased(slopes[:])).fields()) == ["bias"]
    with pytest.raises(ChainClash, match="both have a field 'bias'; rename one"):
        _ = biased(slopes) & biased(torch.ones(4))
    with pytest.raises(ChainClash, match="both have a field 'bias'"):
        _ = biased(slopes) & biased(slopes[:2])


def test_softmax_must_agree_among_those_that_care() -> None:
    assert not trace(wl.Causal() & wl.FlashSigmoid() & Shift()).softmax
    assert trace(wl.Causal() & Shift()).softmax
    assert trace(wl.AttentionSink() & wl.Causal()).softmax
    with pytest.raises(ChainClash, match=r"FlashSigmoid with AttentionSink: .* leave `softmax`"):
        _ = wl.Causal() & wl.FlashSigmoid() & wl.AttentionSink()


def test_a_wrong_link_is_named(placed) -> None:
    class Wrong(wl.Variant):
        def logits_mask(self, at):
            return at.kv_pos - at.q_pos

    chained = wl.Causal() & Wrong()
    with pytest.raises(WrongResult, match="logits_mask of Wrong returned") as caught:
        trace(chained)
    assert placed(caught.value, "at.kv_pos - at.q_pos")
    with pytest.raises(WrongResult, match="logits_mask of Wrong returned values of int32"):
        visible(chained, q_len=2, kv_len=2)


def test_classes_chain_and_other_things_do_not() -> None:
    assert trace(wl.Causal() & Shift) == trace(wl.Causal & Shift())
    with pytest.raises(ArgumentError, match=r"is no Variant; wrap .* warploom.flex"):
        _ = wl.Causal() & (lambda b, h, q, k: q >= k)
    with pytest.raises(ArgumentError, match="None is no Variant"):  # a link that was forgotten
        _ = wl.Causal() & None
    several: Any = [wl.Causal(), wl.SoftCap(9.0)]
    with pytest.raises(ArgumentError, match="is no Variant; chain several with &"):
        wl.AttentionWrapper(several, num_q_heads=1, head_dim=64, device="cpu")
    for join in (lambda: wl.Causal() & wl.SoftCap, lambda: wl.SoftCap & wl.Causal()):
        with pytest.raises(ArgumentError, match=r"is a class, and .*'cap'; .* SoftCap\(cap\)"):
            join()


def test_and_as_a_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match="chain them: `a & b`"):
        _ = wl.Causal() and wl.SoftCap(30.0)


def test_values_are_set_on_links_and_not_on_their_chain() -> None:
    cap = wl.SoftCap(5.0)
    chained = wl.Causal() & cap
    with pytest.raises(ArgumentError, match=r"cap: .* set it on the SoftCap before"):
        chained.cap = 2.0  # type: ignore[attr-defined]
    cap.cap = 2.0
    assert chained.inputs() == {"cap": 2.0}
    chained.note = "mine"  # type: ignore[attr-defined]
