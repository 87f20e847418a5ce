"""About how many instructions an element takes, by which prefills are priced."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.choice.element_cost import instructions_of_element
from warploom.dsl.variants.trace import trace


class Kept(wl.Variant):
    kept = wl.Tensor("bool", (None,))

    def logits_mask(self, at: Any) -> Any:
        return self.kept[at.kv_pos]


class Bits(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        seen = at.kv_pos >= 0
        for factor in (3, 4, 5, 6):
            seen &= ((at.kv_pos * factor + at.q_pos) & 7) != 7
        return seen


class Dilated(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return (at.kv_pos * 3 + at.q_pos) % 7 != 6


class Pairs(wl.Variant):
    pairs = wl.Tensor("uint8", (None, None))

    def logits_mask(self, at: Any) -> Any:
        return self.pairs[at.q_pos, at.kv_pos] != 0


class Near(wl.Variant):
    bias = wl.Tensor("float32", ("q_head", None))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.q_head, at.q_pos - at.kv_pos + 8191]


# Times that a causal prefill of 4,096 rows took on an H200 (32/8 heads), over 1.66 us a tile alone.
@pytest.mark.parametrize(
    ("variant", "times"),
    [
        (Kept(), 1.16),
        (wl.DocumentMask(), 1.18),
        (Bits(), 2.11),
        (Dilated(), 2.60),
        (Pairs(), 2.24),
        (Near(), 2.49),
    ],
)
def test_masks_and_loads_cost_about_what_was_measured(variant: wl.Variant, times: float) -> None:
    beyond_one = max(0, instructions_of_element(trace(wl.Causal() & variant)) - 1)
    assert abs((1.66 + 0.1 * beyond_one) / 1.66 / times - 1) < 0.15


def window(keys: int) -> wl.Variant:
    class Window(wl.Variant):
        def logits_mask(self, at: Any) -> Any:
            return (at.q_pos - at.kv_pos < keys) & (at.kv_pos <= at.q_pos)

    return Window()


class Padding(wl.Variant):
    ends = wl.Tensor("int32", ("batch",))

    def logits_mask(self, at: Any) -> Any:
        return (at.kv_pos < self.ends[at.batch]) & (at.kv_pos <= at.q_pos)


class Bounded(wl.Variant):
    most = wl.Scalar("int32")

    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos < self.most


class OfHeads(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos % at.num_kv_heads == at.kv_head


@pytest.mark.parametrize(
    "variant", [wl.Causal(), window(1024), Padding(), wl.PrefixLM(), wl.TreeMask(), Bounded()]
)
def test_masks_that_most_tiles_need_not_test_cost_nothing(variant: wl.Variant) -> None:
    assert instructions_of_element(trace(variant)) == 0


def test_a_mask_that_hides_something_of_most_tiles_is_counted() -> None:
    """A window as wide as a tile has no tile whose keys are all seen."""
    assert instructions_of_element(trace(window(64))) > 2
    assert instructions_of_element(trace(window(64) & Bounded())) > 2
    assert instructions_of_element(trace(OfHeads())) == 2  # a column's, but for hiding
    assert instructions_of_element(trace(wl.SlidingWindow(64))) == 0  # its width comes at run time


def test_an_exponential_is_the_softmax_s_own_without_one() -> None:
    assert instructions_of_element(trace(wl.FlashSigmoid())) == 4
    assert instructions_of_element(trace(wl.FlashSigmoid() & wl.DocumentMask())) == 8
