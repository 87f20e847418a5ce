"""One-call attention: results, layouts, cached wrappers and plans, FlexAttention's callables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.filled import FILLS, filled_and_cut
from support.padding import with_and_without_garbage
from support.side_by_side import in_threads

from warploom.codegen.build import forbid_compilation
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.packed_mask import PackedMask, TreeMask, pack_masks
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.values.functions import floor
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.flex import flex
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, MissingInput, WrongShape
from warploom.notices import RowsBeforeKeys
from warploom.runtime.calls import attention as module
from warploom.runtime.calls.attention import attention


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 64, generator=generator)
    k, v = torch.randn(2, 2, 21, 2, 64, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.transpose(1, 2)


BOTTOM_RIGHT = torch.ones(9, 21).tril(12).bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_agrees_with_sdpa(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    expected = sdpa(*(x.float() for x in (q, k, v)), attn_mask=BOTTOM_RIGHT)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    out = attention(q, k, v, variant=Causal())
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    swapped = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    hnd = attention(*swapped, variant=Causal(), layout="HND")
    assert torch.equal(hnd.transpose(1, 2), out)


def test_plain_attention_and_classes_are_variants() -> None:
    q, k, v = tensors()
    torch.testing.assert_close(attention(q, k, v), sdpa(q, k, v))
    assert torch.equal(attention(q, k, v, variant=Causal), attention(q, k, v, variant=Causal()))


def test_scale_log_sum_exp_and_lengths() -> None:
    q, k, v = tensors()
    out, lse = attention(q, k, v, sm_scale=0.3, return_lse=True, kv_lens=[21, 4])
    torch.testing.assert_close(out[:1], sdpa(q[:1], k[:1], v[:1], scale=0.3))
    torch.testing.assert_close(out[1:], sdpa(q[1:], k[1:, :4], v[1:, :4], scale=0.3))
    logits = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, 2)) * 0.3
    torch.testing.assert_close(lse[0], logits[0].logsumexp(-1))
    other = attention(q, k, v, sm_scale=0.3, return_lse=True, lse_base="2")[1]
    torch.testing.assert_close(other[0], lse[0] / np.log(2))


def test_rows_before_all_keys_are_told_once_for_each_place() -> None:
    q, k, v = tensors()
    out = torch.empty(0)
    with pytest.warns(RowsBeforeKeys) as told:
        for _ in range(2):
            out = attention(q, k, v, variant=Causal(), kv_lens=[21, 4])
        attention(q, k, v, variant=Causal(), kv_lens=torch.tensor([8, 0], dtype=torch.int32))
    first, second = (str(each.message) for each in told)
    assert first.startswith("kv_lens[1] is 4, and there are 9 rows")
    assert "so the first 5 rows lie before all keys" in first and "Ragged()" in first
    assert "kv_lens[0] is 8" in second and told[0].filename == __file__
    assert not out[1, :5].any() and out[1, 5:].all()  # which is what they are warned of


class ByRow(Variant):
    """A row's number within its request does not depend on where it stands."""

    bias = Tensor("float32", ("batch", "q_idx"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.bias[at.batch, at.q_idx]


@pytest.mark.filterwarnings("error::warploom.notices.RowsBeforeKeys")
def test_rows_before_all_keys_are_told_only_where_they_matter() -> None:
    q, k, v = tensors()
    attention(q, k, v, variant=SoftCap(3.0), kv_lens=[21, 4])  # asks for no position
    attention(q, k, v, variant=ByRow(), kv_lens=[21, 4], bias=torch.zeros(2, 9))
    attention(q, k, v, variant=Causal(), kv_lens=[9, 0])


@pytest.mark.some(2)
@pytest.mark.parametrize("width", [41, 47, 55, 61])
def test_masks_divide_as_the_functor_says(width: int) -> None:
    class Neighbourhood(Variant):
        width = Scalar("float32")

        def logits_mask(self, at: Position) -> Value:
            return floor(at.kv_pos / self.width) == floor(at.q_pos / self.width)

    q, k, v = torch.randn(3, 1, 4 * width, 1, 16)
    constant = flex(None, lambda b, h, q_idx, kv_idx: (kv_idx / width) // 1 == (q_idx / width) // 1)
    for variant in (Neighbourhood(width=width), constant):
        expected = attention(q, k, v, variant=variant, backend="reference")
        torch.testing.assert_close(attention(q, k, v, variant=variant), expected)


@pytest.mark.parametrize("sides", [(10, 2**31 - 1), (2**31 - 1, 3), (2**31 - 1, 2**31 - 1)])
def test_a_huge_window_is_no_limit(sides: tuple[int, int]) -> None:
    q, k, v = tensors()
    unlimited = (-1 if side == 2**31 - 1 else side for side in sides)
    expected = attention(q, k, v, variant=SlidingWindow(*unlimited))
    torch.testing.assert_close(attention(q, k, v, variant=SlidingWindow(*sides)), expected)


def test_flex_callables_with_captured_tensors_go_in_as_they_are() -> None:
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    bias = slopes.view(4, 1, 1) * (torch.arange(21) - torch.arange(9)[:, None])
    out = attention(q, k, v, variant=flex(score_mod))
    torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=bias))


def test_new_values_and_lengths_compile_nothing() -> None:
    q, k, v = tensors()
    attention(q, k, v, variant=Causal() & SlidingWindow(3) & SoftCap(2.0))
    with forbid_compilation():
        for left, cap, rows in ((3, 2.0, 9), (5, 2.0, 9), (5, 9.0, 9), (5, 9.0, 8)):
            variant = Causal() & SlidingWindow(left) & SoftCap(cap)
            out, expected = (
                attention(q[:, :rows], k, v, variant=variant, backend=backend)
                for backend in (None, "reference")
            )
            torch.testing.assert_close(out, expected)


def test_values_given_to_the_call_override_bound_ones() -> None:
    q, k, v = tensors()
    given = attention(q, k, v, variant=SlidingWindow(3) & Alibi(np.zeros(4)), left=1)
    torch.testing.assert_close(given, attention(q, k, v, variant=SlidingWindow(1)))


def test_scalars_of_the_mask_fall_back_to_their_default() -> None:
    class Window(Variant):
        width = Scalar("int32", default=100)

        def logits_mask(self, at: Position) -> Value:
            return at.kv_pos >= at.q_pos - self.width

    q, k, v = tensors()
    whole, narrow = (attention(q, k, v, variant=Window(width=n)) for n in (100, 3))
    assert not torch.equal(whole, narrow)
    for given in (None, 3, None):
        inputs: dict[str, Any] = {} if given is None else {"width": given}
        expected = whole if given is None else narrow
        assert torch.equal(attention(q, k, v, variant=Window(), **inputs), expected)


def test_scalars_of_the_mask_are_missed_at_every_call() -> None:
    class Near(Variant):
        reach = Scalar("int32")

        def logits_mask(self, at: Position) -> Value:
            return at.kv_pos >= at.q_pos - self.reach

    q, k, v = tensors()
    for _ in range(2):
        with pytest.raises(MissingInput, match="Near reads 'reach'"):
            attention(q, k, v, variant=Near())
        attention(q, k, v, variant=Near(reach=3))


def test_a_plan_is_made_once_for_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    attention(q, k, v, variant=SlidingWindow(2))
    plans = []
    plan = module.AttentionWrapper.plan
    monkeypatch.setattr(
        module.AttentionWrapper, "plan", lambda *a, **b: (plans.append(a), plan(*a, **b))
    )
    attention(q + 1, k, v, variant=SlidingWindow(2))
    assert len(plans) == 0
    attention(q, k, v, variant=SlidingWindow(3))
    attention(q, k[:, :20], v[:, :20], variant=SlidingWindow(3))
    attention(q, k, v, variant=SlidingWindow(3), kv_lens=[9, 10])
    assert len(plans) == 3


def test_the_cache_of_wrappers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMIT", 2)
    q, k, v = tensors()
    for scale in (0.1, 0.2, 0.3, 0.4):
        attention(q, k, v, sm_scale=scale)
    assert len(module._entries) == 2


def test_an_edited_functor_is_seen() -> None:
    class Edited(Variant):
        gain = Scalar("float32", default=1.0)

        def logits_transform(self, logits: Value, at: Position) -> Value:
            return logits * self.gain

    q, k, v = tensors()
    before = attention(q, k, v, variant=Edited())
    Edited.logits_transform = lambda self, logits, at: logits * self.gain * 0.0  # type: ignore[method-assign]
    after = attention(q, k, v, variant=Edited())
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, sdpa(q * 0, k, v))


def test_threads_have_their_own_plans() -> None:
    q, k, v = tensors()
    expected = {rows: sdpa(q[:, :rows], k, v) for rows in range(1, 10)}

    def work(first: int) -> None:
        for rows in [*range(first, 10), *range(1, first)] * 3:
            torch.testing.assert_close(attention(q[:, :rows], k, v), expected[rows])

    in_threads(work, (1, 4, 7))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 4, 7), (0, 0, 7), (2, 0, 7), (2, 4, 0)])
def test_nothing_to_attend_to(batch: int, rows: int, keys: int, layout: Any) -> None:
    q, k, v = (torch.ones(batch, n, 2, 16) for n in (rows, keys, keys))
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(q, k, v[..., :8], layout=layout, return_lse=True)
    assert out.shape == (*q.shape[:3], 8)
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.some(3)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_filled_with_large_numbers_weigh_nothing(
    fill: float, rows: int, dtype: torch.dtype
) -> None:
    q = torch.randn(1, rows, 4, 32, dtype=dtype)
    out, expected = filled_and_cut(fill, q, num_kv_heads=2)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=2 * tolerance)


def test_captured_tensors_that_end_too_early_are_refused() -> None:
    bias, documents, steps = torch.randn(4, 21), torch.zeros(9).int(), torch.randn(3)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx] + steps[q_idx - kv_idx + 5]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] <= kv_idx

    q, k, v = torch.randn(2, 9, 4, 64), torch.randn(2, 21, 2, 64), torch.randn(2, 21, 2, 64)
    long = torch.randn(2, 22, 2, 64)
    variant = flex(score_mod, mask_mod)
    whole = attention(q, k, v, variant=variant)
    reference = attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(whole, reference)  # also where the index of steps is clamped
    for backend in (None, "reference"):
        for tensors, text in (
            ((q, long, long), r"bias has shape \(4, 21\); .* 22 along dimension 1, .* by kv_idx"),
            ((torch.randn(2, 10, 4, 64), k, v), r"documents has .* 10 along dimension 0, .* q_idx"),
            ((torch.randn(2, 9, 6, 64), k, v), "bias has .* at least 6 along dimension 0, .* by h"),
        ):
            with pytest.raises(WrongShape, match=text):
                attention(*tensors, variant=variant, backend=backend)


def test_callables_that_capture_one_tensor_share_it_when_joined() -> None:
    slopes, scale, document = torch.rand(4), torch.tensor(0.5), torch.arange(21) // 5

    def sloped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale - slopes[h] * (kv_idx + 0.1 * document[kv_idx])

    def pushed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * scale + slopes[h] * q_idx

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document[q_idx] >= document[kv_idx]

    def both(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return pushed(sloped(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    joined, whole = flex(sloped) & flex(pushed, same), flex(both, same)
    assert sorted(joined.fields()) == ["document", "scale", "slopes"]
    q, k, v = tensors()
    before = attention(q, k, v, variant=joined)
    torch.testing.assert_close(before, attention(q, k, v, variant=whole))
    slopes.neg_()  # what they hold is read at each call
    after = attention(q, k, v, variant=joined)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, attention(q, k, v, variant=whole))


def test_flex_callables_decode_like_they_prefill() -> None:
    causal = flex(None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q_idx="position")
    q, k, v = torch.randn(2, 9, 4, 64), torch.randn(2, 9, 2, 64), torch.randn(2, 9, 2, 64)
    prefill = attention(q, k, v, variant=causal)
    torch.testing.assert_close(attention(q[:, -1:], k, v, variant=causal), prefill[:, -1:])


@pytest.mark.parametrize("kind", [PackedMask, TreeMask])
def test_packed_masks_must_cover_dense_batches_too(kind: Any) -> None:
    q, (k, v) = torch.randn(2, 4, 2, 32), torch.randn(2, 2, 20, 2, 32)
    columns = 20 if kind is PackedMask else 4

    def attend(*shapes: tuple[int, int], given: bool = False, **options: Any) -> torch.Tensor:
        masks = pack_masks([np.ones(shape, bool) for shape in shapes])
        if not given:
            return attention(q, k, v, variant=kind(*masks) & Causal(), **options)
        names = {"packed_mask": torch.from_numpy(masks[0]), "mask_indptr": masks[1]}
        return attention(q, k, v, variant=kind(), **names, **options)

    enough = [(4, columns), (4, columns)]
    for given in (False, True):
        attend(*enough, given=given)  # the lengths of the calls below have a plan
        with pytest.raises(ArgumentError, match=r"request 1 has 8 bits; the batch needs 4 rows of"):
            attend(enough[0], (2, 3), given=given)
        with pytest.raises(ArgumentError, match=r"mask_indptr: has 2 entries; expected .* = 3"):
            attend(enough[0], given=given)
    if kind is PackedMask:
        attend((4, 9), (4, 20), kv_lens=[9, 20])


def test_many_tiles_with_the_same_maximum_weigh_the_same() -> None:
    keys, logit = 16384, 315.0
    q, k = torch.full((1, 1, 1, 8), logit / 8), torch.ones(1, keys, 1, 8)
    v = (torch.arange(keys) < keys // 2).float()[None, :, None, None].expand(1, keys, 1, 8)
    out = attention(q, k, v.contiguous(), variant=Variant(), sm_scale=1.0)
    torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 40])
def test_what_no_row_sees_may_be_garbage(rows: int) -> None:
    with_garbage, without = with_and_without_garbage(rows, num_q_heads=4)
    assert torch.equal(with_garbage, without)


def test_torch_functions_in_kernels() -> None:
    """Those that are lowered to several operations, halves and both signs included."""

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        apart = q_idx - kv_idx
        steps = torch.div(apart, 3, rounding_mode="trunc") + torch.sign(apart)
        halves = torch.round(apart / 2) + torch.div(apart / 4, 0.5, rounding_mode="trunc")
        smooth = torch.nn.functional.gelu(score) + torch.nn.functional.silu(score)
        return smooth + 0.1 * (steps.to(torch.float32) + halves) * (apart > 2).to(torch.float32)

    q, k, v = torch.randn(3, 1, 20, 2, 16)
    variant = flex(score)
    out = attention(q, k, v, variant=variant)
    expected = attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(out, expected)


def test_the_log_sum_exp_of_one_key_is_its_logit() -> None:
    """In bfloat16, too, whose exponentials are coarse: the largest weight is 1."""
    q, k = torch.randn(1, 500, 1, 64).bfloat16(), torch.randn(1, 1, 1, 64).bfloat16()
    _, lse = attention(q, k, k, return_lse=True)
    logits = (q[0, :, 0].double() @ k[0, :, 0].double().T / 8)[:, 0]
    torch.testing.assert_close(lse[0, :, 0].double(), logits, rtol=0, atol=2e-6)
