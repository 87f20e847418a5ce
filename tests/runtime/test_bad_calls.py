"""Calls as other libraries have them, and names that are nearly right, are told the right way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import warploom as wl
from warploom import errors, testing
from warploom.calls import explained
from warploom.runtime.calls.draw import tile_classes

Q, K = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}
MAKE: Any = wl.AttentionWrapper


def planned() -> wl.AttentionWrapper:
    wrapper = wl.AttentionWrapper(**SHAPE, device="cpu", backend="reference")
    wrapper.plan([0, 3], [0, 5])
    return wrapper


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scale", "The factor of q.k is called sm_scale"),
        ("causal", r"warploom.Causal\(\)"),
        ("is_causal", r"warploom.Causal\(\)"),
        ("attn_mask", "A mask is a variant"),
        ("score_mod", r"Wrap it: variant=warploom.flex\(score_mod, mask_mod\)"),
        ("mask_mod", r"Wrap it: variant=warploom.flex\(score_mod, mask_mod\)"),
        ("block_mask", r"derived from it. Wrap it: variant=warploom.flex\(score_mod, mask_mod\)"),
        ("cache_seqlens", r"kv_lens in attention\(\)"),
        ("seq_lens", r"kv_lens in attention\(\)"),
        ("block_tables", "A page table is planned as kv_indptr, kv_indices"),
        ("out", r"AttentionWrapper.run\(q, \(k, v\), out=..., lse=...\)"),
        ("lse", r"AttentionWrapper.run\(q, \(k, v\), out=..., lse=...\)"),
        ("key_transform", r"option of the wrapper: AttentionWrapper\(..., key_transform=...\)"),
        ("enable_gqa", "grouped queries follow from the number of heads"),
        ("dropout_p", "serves inference"),
        ("k_scale", r"warploom.KVScale\(k, v\)"),
        ("packed_custom_mask", "warploom.PackedMask"),
        ("pos_encoding_mode", r"warploom.Rope\(...\)"),
        ("soft_max_scale", "It takes: nothing"),
        ("sm_scal", "Did you mean 'sm_scale'"),
    ],
)
def test_names_of_other_libraries_in_attention(name: str, text: str) -> None:
    given: Any = {name: 1.0}
    with pytest.raises(errors.UnknownInput, match=f"no input '{name}'.*{text}"):
        wl.attention(Q[None], K[None], K[None], **given)


def test_a_block_mask_belongs_to_flex() -> None:
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 5, device="cpu")
    with pytest.raises(errors.ArgumentError, match=r"a BlockMask is no .*flex\(mask_mod=...\)"):
        wl.attention(Q[None], K[None], K[None], variant=seen)  # pyright: ignore
    with pytest.raises(errors.ArgumentError, match=r"score_mod: is a BlockMask, .*as mask_mod=..."):
        wl.flex(seen)  # pyright: ignore


def test_variants_of_tests_and_pictures_are_those_of_attention() -> None:
    """A class stands for its instance, and callables are pointed at `flex`."""
    sizes: dict[str, Any] = {"q_len": 8, "kv_len": 8, "tile": (4, 4)}
    assert tile_classes(wl.Causal, **sizes).tolist() == [[1, 0], [2, 1]]
    wanting: list[tuple[Any, str]] = [
        (lambda b, h, i, j: i >= j, "flex"),
        (wl.SoftCap, r"SoftCap\(cap\)"),
    ]
    for given, text in wanting:
        for call in (
            lambda given=given: wl.draw_mask(given, "mask.png", q_len=8),
            lambda given=given: testing.check(given, devices=["cpu"]),
        ):
            with pytest.raises(errors.ArgumentError, match=f"^variant: .*{text}"):
                call()


def test_a_near_input_of_the_variant_comes_before_other_libraries() -> None:
    with pytest.raises(errors.UnknownInput, match="Did you mean 'v_scale'"):
        wl.attention(Q[None], K[None], K[None], variant=wl.KVScale(1.0, 1.0), scale=0.1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_qo_heads": 4}, r"AttentionWrapper\(\): it takes no 'num_qo_heads'. .*'num_q_heads'"),
        ({"num_q_head": 4}, "Did you mean 'num_q_heads'[?]"),
        ({**SHAPE, "layout": "HND"}, r"kv_format=warploom.Paged\(16, layout='HND'\)"),
        ({**SHAPE, "page_size": 16}, r"kv_format=warploom.Paged\(page_size\)"),
        ({**SHAPE, "colour": 1}, "it takes no 'colour'.$"),
        ({"num_q_heads": 4}, "missing a required argument: 'head_dim'"),
    ],
)
def test_declarations_with_unknown_names(given: Any, text: str) -> None:
    with pytest.raises(errors.WrongCall, match=text):
        MAKE(**given)
    with pytest.raises(TypeError):  # what Python raises for it
        MAKE(**given)


def test_a_type_error_from_inside_stays_as_it_is() -> None:
    with pytest.raises(TypeError) as caught:
        explained(len)(3)  # type: ignore[arg-type]
    assert not isinstance(caught.value, errors.WrongCall)


@pytest.mark.parametrize("value", ["64", 64.0, None])
@pytest.mark.parametrize("kind", [wl.AttentionWrapper, wl.Appender])
def test_head_dimensions_are_ints(kind: Any, value: Any) -> None:
    given = {"num_kv_heads": 2, "num_q_heads": 4, "kv_format": wl.Paged(4), "device": "cpu"}
    with pytest.raises(errors.ArgumentError, match=f"head_dim: is {value!r}; expected an int"):
        kind(**given, head_dim=value)


@pytest.mark.parametrize("value", ["x", "1", True, [1.0, 2.0], torch.ones(2)])
def test_scales_are_numbers(value: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"sm_scale: is .*; expected a number, or None"):
        MAKE(**SHAPE, device="cpu", sm_scale=value)


def test_a_scale_of_attention_is_a_number() -> None:
    wrong: Any
    for wrong, shown in (("x", "'x'"), ([0.1], r"\[0.1\]")):
        with pytest.raises(errors.ArgumentError, match=f"sm_scale: is {shown}"):
            wl.attention(Q[None], K[None], K[None], sm_scale=wrong, backend="reference")


@pytest.mark.parametrize(
    ("kv_format", "plan", "text"),
    [
        (wl.BlockSparse((2, 4)), {"kv_indptr": [0, 1, 1, 2], "kv_lens": [5]},
         "kv_indptr has 4 entries.*have 3 entries, one entry more than there are block rows"),
        (wl.BlockSparse((2, 4)), {"last_page_len": [4], "kv_lens": [5]}, "take it; give kv_lens"),
        (wl.Paged(4), {"last_page_len": [4], "kv_lens": [5]}, "take it; give last_page_len"),
        (wl.Paged(4), {}, r"needs it: \(qo_indptr, kv_indptr, kv_indices, last_page_len\)"),
        (wl.Paged(4), {"kv_indices": None, "last_page_len": [4]},
         r"kv_indices: the Paged .* needs it: \(qo_indptr, kv_indptr, kv_indices, last_page_len"),
        (wl.BlockSparse((2, 4)), {"kv_indices": None, "kv_lens": [5]}, r"kv_indices, kv_lens\)"),
        (wl.Paged(4), {"qo_indptr": [0, 1, 3], "last_page_len": [4]},
         "qo_indptr has 3 entries, of 2 requests; kv_indptr has 2, of 1, last_page_len has 1,"),
        (wl.Ragged(), {"qo_indptr": [0, 1, 3], "kv_indices": None}, "kv_indptr has 2, of 1. All"),
        (wl.Ragged(), {}, r"kv_indices: .*pages need kv_format=warploom.Paged\(page_size\)"),
        (wl.Dense(), {"kv_indices": None, "kv_lens": [5]}, "kv_indptr tells the keys"),
    ],
)  # fmt: skip
def test_lengths_of_another_format(kv_format: Any, plan: Any, text: str) -> None:
    wrapper = wl.AttentionWrapper(**SHAPE, kv_format=kv_format, device="cpu", backend="reference")
    with pytest.raises(errors.ArgumentError, match=text):
        wrapper.plan(**{"qo_indptr": [0, 3], "kv_indptr": [0, 2], "kv_indices": [0, 1], **plan})


def test_arguments_by_position_that_belong_elsewhere() -> None:
    plan: Any = planned().plan
    with pytest.raises(errors.WrongCall, match=r"too many .*belong to the constructor"):
        plan([0, 3], [0, 2], [0, 1], [4], 4, 2, 64, 16)
    with pytest.raises(errors.WrongCall, match=r"too many .*need their names: num_q_heads=..."):
        MAKE(wl.Causal(), 4, 2, 64)


def test_sizes_say_where_they_come_from() -> None:
    with pytest.raises(errors.WrongShape, match=r"; 3 is qo_indptr\[-1\] of the plan"):
        planned().run(Q[:2], (K, K))
    wrapper = wl.AttentionWrapper(**SHAPE, kv_format=wl.Paged(4), device="cpu", backend="reference")
    wrapper.plan([0, 3], [0, 2], [0, 9], [2])
    with pytest.raises(
        errors.IndexOutOfRange, match="9; valid are 0 to 8, since the cache has 9 p"
    ):
        wrapper.run(Q, torch.zeros(9, 2, 4, 2, 64))


def test_keys_and_values_apart() -> None:
    run: Any = planned().run
    with pytest.raises(errors.WrongCall, match=r"run\(q, \(k, v\)\)"):
        run(Q, K, K)
    attend: Any = wl.attention
    with pytest.raises(errors.WrongCall, match=r"attention\(\): .* such as variant="):
        attend(Q[None], K[None], K[None], wl.Causal())


def test_plan_with_flashinfers_names() -> None:
    plan: Any = planned().plan
    for name, text in (
        ("paged_kv_indptr", "It is called kv_indptr"),
        ("block_tables", "A page table is planned as"),
        ("kv_indprt", "Did you mean 'kv_indptr'"),
    ):
        reason = rf"^AttentionWrapper.plan\(\): '{name}' is no argument of it; missing .*_indptr'"
        with pytest.raises(errors.WrongCall, match=f"{reason}. {text}"):
            plan([0, 3], **{name: [0, 5]})
    with pytest.raises(errors.WrongCall, match=r"_indptr'. Write plan\(qo_indptr, kv_indptr, "):
        plan([0, 3], colour=1)  # it may be an input
    with pytest.raises(errors.UnknownInput, match=r"no input 'paged_kv_indptr'. It is called kv"):
        plan([0, 3], [0, 5], paged_kv_indptr=[0])
    with pytest.raises(errors.UnknownInput, match="Did you mean 'kv_indices'"):
        plan([0, 3], [0, 5], paged_kv_indices=[0])


def test_misspelt_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"'Casual'. Did you mean 'Causal'"):
        wl.Casual  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        wl.zzz  # noqa: B018


def test_variants_have_no_union() -> None:
    left, right = wl.Causal(), wl.SlidingWindow(3)
    for other in (right, wl.SlidingWindow, 3):
        with pytest.raises(errors.NoUnion, match=r"logits_mask joins both conditions with \|"):
            _ = left | other
    with pytest.raises(errors.NoUnion, match="Causal & SlidingWindow shows what both show"):
        _ = left | right


@pytest.mark.parametrize("value", [2**33, 2**31, -(2**63)])
def test_values_beyond_the_declared_type_are_at_fault_not_their_type(value: int) -> None:
    """Converting them, as for another type, would cut them off."""
    ids = torch.zeros(1, 5, dtype=torch.int64)
    ids[0, 3] = value
    with pytest.raises(errors.ArgumentError, match=rf"value {value} at \[0, 3\] does not fit") as e:
        wl.attention(Q[None], K[None], K[None], variant=wl.DocumentMask(ids))
    assert not isinstance(e.value, errors.WrongDType) and ".to(" not in str(e.value)


def test_the_least_int32_is_taken() -> None:
    ids = torch.full((1, 5), -(2**31), dtype=torch.int64)
    wl.attention(Q[None], K[None], K[None], variant=wl.DocumentMask(ids), backend="reference")


def forbidden_attention(*tensors: torch.Tensor, **options: Any) -> None:
    """Wrong calls end before a kernel is made, which takes seconds."""
    with wl.forbid_compilation():
        wl.attention(*tensors, **options)


class Listed(wl.Variant):
    ids = wl.Tensor("int32", ("batch", "kv_pos"))

    def logits_mask(self, at: Any) -> Any:
        return self.ids[at.batch, at.kv_pos] > 0


def test_wrong_tensors_of_attention_cost_no_kernel() -> None:
    q = torch.zeros(1, 6, 2, 16)
    wide = torch.zeros(1, 6, 2, 24)
    with pytest.raises(errors.WrongShape, match=r"k has shape .* head dimension 16, as q"):
        forbidden_attention(q, wide, wide)
    for wrong in ((q, q.half(), q), (q, q, q.half())):
        with pytest.raises(errors.WrongDType, match=r"torch.float16; expected torch.float32"):
            forbidden_attention(*wrong)
    with pytest.raises(errors.WrongDevice, match="k is on meta"):
        forbidden_attention(q, q.to("meta"), q.to("meta"))
    three = torch.zeros(1, 6, 3, 16)
    with pytest.raises(errors.ArgumentError, match="q: its 2 heads are no multiple of k's 3"):
        forbidden_attention(q, three, three)
    with pytest.raises(errors.MissingInput, match=r"Pass ids=... \(int32 tensor \[batch, kv_pos"):
        forbidden_attention(q, q, q, variant=Listed())


def test_attention_proposes_no_declaration() -> None:
    q = torch.zeros(1, 6, 2, 16)
    for _ in range(2):  # before there is a wrapper of this kind, and after
        with pytest.raises(errors.WrongDType, match=r"Convert it with .to\(torch.float32\)\.$"):
            wl.attention(q, q.half(), q, backend="reference")
        wl.attention(q, q, q, backend="reference")


@pytest.mark.parametrize("sides", [(-2,), (3, -2)])
def test_only_minus_one_switches_a_side_of_a_window_off(sides: tuple[int, ...]) -> None:
    with pytest.raises(errors.ArgumentError, match=r"(left|right): is -2; .* or -1 for no limit"):
        wl.SlidingWindow(*sides)


def test_tensors_of_the_other_layout_are_recognised() -> None:
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 9, 16)
    with pytest.raises(errors.ArgumentError, match="layout='HND' they are 4 and 2"):
        forbidden_attention(q, k, k)
    shape: dict[str, Any] = {**SHAPE, "head_dim": 16, "device": "cpu", "backend": "reference"}
    dense = wl.AttentionWrapper(kv_format=wl.Dense(), **shape)
    dense.plan([0, 3], [0, 9])
    with pytest.raises(errors.WrongShape, match=r"head, dim\]; layout='HND' would fit it"):
        dense.run(q, (k, k))
    with pytest.raises(
        errors.WrongShape, match=r"\[batch>=1, token>=9, .*; layout='HND' would fit"
    ):
        dense.run(q.transpose(1, 2), (k, k))
    with pytest.raises(errors.WrongShape, match=r"\[batch>=1, token>=9, head=2, dim=16\]\.$"):
        dense.run(q.transpose(1, 2), (k[..., :8], k))
    paged = wl.AttentionWrapper(kv_format=wl.Paged(9, layout="HND"), **shape)
    paged.plan([0, 3], [0, 1], [0], [9])
    with pytest.raises(errors.WrongShape, match=r"\[page>=0, head=2.*; layout='NHD' would fit"):
        paged.run(q[0].transpose(0, 1), (k.transpose(1, 2),) * 2)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("kv_format", "plan", "k", "v", "text"),
    [
        (None, ([0, 3], [0, 5]), (5, 2, 64), (6, 2, 64), "v has .*many tokens as k, .*5, 2, 64"),
        (
            wl.Paged(4),
            ([0, 3], [0, 2], [0, 1], [2]),
            (3, 4, 2, 64),
            (9, 4, 2, 64),
            "many pages as k",
        ),
        (
            wl.Paged(4),
            ([0, 3], [0, 2], [0, 8], [2]),
            (9, 4, 2, 64),
            (3, 4, 2, 64),
            "many pages as k",  # which reach as far as the table
        ),
        (wl.Dense(), ([0, 3], [0, 5]), (1, 5, 2, 64), (2, 5, 2, 64), "as many requests as k"),
        (
            wl.Dense(layout="HND"),
            ([0, 3], [0, 5]),
            (1, 2, 7, 64),
            (1, 2, 5, 64),
            "as many tokens as k",
        ),
    ],
)
def test_keys_and_values_of_different_counts(
    kv_format: Any, plan: Any, k: Any, v: Any, text: str, backend: Any
) -> None:
    """One list addresses both, so that a difference is a mistake."""
    wrapper = wl.AttentionWrapper(kv_format=kv_format, device="cpu", backend=backend, **SHAPE)
    wrapper.plan(*plan)
    q = Q
    if isinstance(kv_format, wl.Dense):
        q = Q[None] if kv_format.layout == "NHD" else Q[None].transpose(1, 2)
    with pytest.raises(errors.WrongShape, match=text):
        wrapper.run(q, (torch.zeros(k), torch.zeros(v)))


class Gain(wl.Variant):
    gain = wl.Scalar("float32", default=1.0)
    reach = wl.Scalar("int32", default=9)

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits * self.gain

    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos < self.reach


@pytest.mark.parametrize("name", ["gain", "reach"])
@pytest.mark.parametrize("value", [np.ones(2, int), torch.ones(1, 2).int(), torch.ones(0).int()])
def test_a_scalar_is_one_number(name: str, value: Any) -> None:
    q = torch.zeros(1, 6, 2, 16)
    wrapper = wl.AttentionWrapper(Gain(), **SHAPE, device="cpu", backend="reference")
    one = {name: value.reshape(-1)[:1]}
    text = rf"{name} has shape .*; expected one number.* as Tensor\('(float|int)32', axes\)"
    for call in (
        lambda: wl.attention(q, q, q, variant=Gain(), backend="reference", **{name: value}),
        lambda: wrapper.plan([0, 3], [0, 5], **{name: value}),
        lambda: wrapper.run(Q, (K, K), **{name: value}),
    ):
        with pytest.raises(errors.WrongShape, match=text):
            call()
        wrapper.plan([0, 3], [0, 5], **one if len(one[name]) else {})


def test_a_field_that_is_none_is_named() -> None:
    q = torch.zeros(1, 6, 2, 16)
    for call in (
        lambda: wl.attention(q, q, q, variant=Listed(), ids=None),
        lambda: wl.AttentionWrapper(Listed(), **SHAPE, device="cpu").plan([0, 3], [0, 5], ids=None),
    ):
        with pytest.raises(errors.ArgumentError, match=r"ids: is None; the variant reads it: give"):
            call()


def test_index_pointers_say_what_they_are() -> None:
    wrapper = wl.AttentionWrapper(**SHAPE, device="cpu", backend="reference")
    with pytest.raises(errors.BadIndptr, match=r"qo_indptr has 2 .*; kv_indptr has 3, of 2\. All"):
        wrapper.plan([0, 3], [0, 2, 5])
    with pytest.raises(errors.BadIndptr, match=r"starts with 1\. It holds running totals.*cumsum"):
        wrapper.plan([1, 3], [0, 2])


@pytest.mark.parametrize("wrong", [[[[0]]], torch.zeros(1, 2, 1, dtype=torch.int64)])
def test_selections_are_int32_tensors(wrong: Any) -> None:
    shape: dict[str, Any] = {**SHAPE, "kv_format": wl.Paged(4), "device": "cpu"}
    with pytest.raises(errors.ArgumentError, match=r"where it lies.*torch\.int32"):
        wl.PageSelectionWrapper(**shape).plan([0, 1], [0, 1], wrong, [4])
