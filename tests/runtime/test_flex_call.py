"""`wl.flex_attention` is called as torch's and says the same."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import warploom as wl
from warploom.errors import ArgumentError
from warploom.runtime.calls.flex_attention import _variant

ROWS, KEYS = 40, 130


def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.tanh((kv_idx - q_idx) / 16.0) * (h + 1)


def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx + 90) & (kv_idx % 7 != 3)


def tensors(kv_heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    q = torch.randn(2, 4, ROWS, 16)
    k, v = torch.randn(2, 2, kv_heads, KEYS, 16)
    return q, k, v


def block_mask(mod: Any = mask_mod) -> Any:
    return theirs.create_block_mask(mod, None, None, ROWS, KEYS, "cpu", (16, 32))


def test_it_takes_what_torchs_takes() -> None:
    ours, torchs = (inspect.signature(one).parameters.values() for one in
                    (wl.flex_attention, theirs.flex_attention))  # fmt: skip
    known = {one.name: (one.kind, one.default) for one in ours}
    assert all(known[one.name] == (one.kind, one.default) for one in torchs)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("with_score", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_it_says_what_torchs_says(kv_heads: int, with_score: bool, with_mask: bool) -> None:
    given: Any = {
        "score_mod": score_mod if with_score else None, "scale": 0.3,
        "block_mask": block_mask() if with_mask else None, "enable_gqa": kv_heads < 4,
        "return_lse": True,
    }  # fmt: skip
    found = wl.flex_attention(*tensors(kv_heads), **given)
    expected = theirs.flex_attention(*tensors(kv_heads), **given)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    given["return_lse"] = False
    torch.testing.assert_close(wl.flex_attention(*tensors(kv_heads), **given), found[0])


def test_functions_and_masks_are_traced_once() -> None:
    mask = block_mask()
    wl.flex_attention(*tensors(), score_mod, mask)
    before = wl.stats().traces
    variants = _variant(score_mod, mask), _variant(score_mod, None), _variant(None, mask)
    wl.flex_attention(*tensors(), score_mod, mask)
    assert wl.stats().traces == before
    again = _variant(score_mod, mask), _variant(score_mod, None), _variant(None, mask)
    assert all(one is other for one, other in zip(variants, again, strict=True))
    assert _variant(None, None) is None


def test_what_a_function_reads_is_read_anew() -> None:
    factor = [1.0]
    bias = torch.randn(4)
    mod = lambda score, b, h, q, k: score * factor[0] + bias[h] * k  # noqa: E731
    first = wl.flex_attention(*tensors(), mod)
    factor[0] = 3.0
    bias.mul_(-1.0)
    expected = theirs.flex_attention(*tensors(), mod)
    found = wl.flex_attention(*tensors(), mod)
    assert not torch.allclose(found, first)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_lists_that_were_written_are_read_anew() -> None:
    mask = block_mask()
    first = wl.flex_attention(*tensors(), block_mask=mask)
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    nothing = wl.flex_attention(*tensors(), block_mask=mask)
    assert first.any() and not nothing.any()


def test_masks_that_are_given_other_parts_are_made_anew() -> None:
    """As decode loops do, which give one block mask another mask_mod at each step."""
    mask = block_mask()
    wl.flex_attention(*tensors(), block_mask=mask)
    for other in (copy.copy(mask), mask):
        other.mask_mod = lambda b, h, q, k: k <= q
        lists = block_mask(other.mask_mod)
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            setattr(other, name, getattr(lists, name))
        found = wl.flex_attention(*tensors(), block_mask=other)
        expected = wl.attention(*tensors(), variant=wl.flex(mask_mod=other.mask_mod), layout="HND")
        torch.testing.assert_close(found, expected)


def test_lists_whose_writes_nobody_counts_are_read_each_time() -> None:
    with torch.inference_mode():
        mask = block_mask()
        first = wl.flex_attention(*tensors(), block_mask=mask)
        mask.kv_num_blocks.zero_()
        mask.full_kv_num_blocks.zero_()
        assert first.any() and not wl.flex_attention(*tensors(), block_mask=mask).any()


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.factor


@dataclasses.dataclass(frozen=True)
class Frozen:
    factor: float

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.factor


METHODS = (lambda x: Scaled(x).mod, Frozen, lambda x: partial(Scaled.mod, Scaled(x)))


@pytest.mark.parametrize("make", METHODS)
def test_methods_and_callable_objects(make: Any) -> None:
    for factor in (0.5, 3.0):
        found = wl.flex_attention(*tensors(), make(factor))
        expected = theirs.flex_attention(*tensors(), lambda s, b, h, q, k, f=factor: s * f)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    kept = Scaled(2.0)
    assert _variant(kept.mod, None) is _variant(kept.mod, None)


def test_what_is_used_stays_among_those_that_are_kept() -> None:
    mask, others = block_mask(), [lambda s, b, h, q, k, i=i: s * i for i in range(20)]
    first = _variant(score_mod, mask)
    for other in others:
        _variant(other, mask)
        assert _variant(score_mod, mask) is first


def test_a_function_is_no_block_mask() -> None:
    with pytest.raises(ArgumentError, match="create_block_mask"):
        wl.flex_attention(*tensors(), block_mask=mask_mod)


def test_a_function_goes_with_its_variant() -> None:
    def used() -> ref[Any]:
        bias = torch.randn(4, ROWS, KEYS)
        mod = lambda score, b, h, q, k: score + bias[h, q, k]  # noqa: E731
        wl.flex_attention(*tensors(), mod)
        return ref(bias)

    used()  # the wrapper that all share keeps the variant that it was made of
    dead = used()
    gc.collect()
    assert dead() is None


def test_fewer_heads_must_be_meant() -> None:
    with pytest.raises(ArgumentError, match="key: has 2 heads and query 4; say enable_gqa=True"):
        wl.flex_attention(*tensors(2))


def test_torch_compile_leaves_it_as_it_is() -> None:
    compiled = torch.compile(wl.flex_attention, backend="eager")
    found = compiled(*tensors(), score_mod, block_mask())
    torch.testing.assert_close(found, wl.flex_attention(*tensors(), score_mod, block_mask()))
