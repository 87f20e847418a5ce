"""States over parts of the keys merge into the state over all of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors

HEADS, DIM, KEYS = 4, 32, 24
INF, NAN = float("inf"), float("nan")


def states(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(*shape, generator=generator).to(dtype)
    return v, 5 * torch.randn(*shape[:-1], generator=generator)


def exact(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged over axis 1, in float64."""
    weights = torch.softmax(s.double(), 1)
    return (weights.unsqueeze(-1) * v.double()).sum(1), torch.logsumexp(s.double(), 1)


def test_parts_of_the_keys_merge_into_the_whole() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, HEADS, DIM)
    k, v = torch.randn(2, 2, KEYS, 2, DIM)
    whole = wl.attention(q, k, v, return_lse=True)
    cuts = [0, 3, 10, KEYS]
    parts = [
        wl.attention(q, k[:, a:b].contiguous(), v[:, a:b].contiguous(), return_lse=True)
        for a, b in pairwise(cuts)
    ]
    two = wl.merge_state(*wl.merge_state(*parts[0], *parts[1]), *parts[2])
    outs, sums = zip(*parts, strict=True)
    three = wl.merge_states(torch.stack(outs, 2), torch.stack(sums, 2))
    for found in (two, three):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def variants() -> list[wl.Variant]:
    """One of each that ships and has a softmax, apart from the sink."""
    rng = np.random.default_rng(0)
    masks = [rng.random((5, KEYS)) < 0.5 for _ in range(2)]
    ids = np.repeat([0, 1, 2], KEYS // 3)[None].repeat(2, 0).astype(np.int32)
    return [
        wl.Variant(),
        wl.Alibi(np.array([0.5, 0.1, 0.3, 0.2], np.float32)),
        wl.Causal(),
        wl.DocumentMask(ids),
        wl.HeadKVScale(*np.array([[0.5, 2], [3, 4]], np.float32)),
        wl.KVScale(0.5, 3.0),
        wl.TokenKVScale(*rng.random((2, 2, KEYS, 2), dtype=np.float32)),
        wl.PackedMask(*wl.pack_masks(masks)),
        wl.PrefixLM(np.array([3, 7], np.int32)),
        wl.QKNorm(*rng.random((2, DIM), dtype=np.float32)),
        wl.Rope(),
        wl.SlidingWindow(6, 2),
        wl.SoftCap(5.0),
        wl.TreeMask(*wl.pack_masks([np.tril(np.ones((5, 5), bool))] * 2)),
    ]


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_every_variant_merges(variant: wl.Variant, lse_base: str) -> None:
    """Parts keep their positions: each is the whole with the other's keys hidden."""
    torch.manual_seed(0)
    q = torch.randn(2, 5, HEADS, DIM)
    k, v = torch.randn(2, 2, KEYS, 2, DIM)

    def attend(part: wl.Variant | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = variant if part is None else variant & part
        options: dict[str, Any] = {"backend": "reference", "lse_base": lse_base}
        return wl.attention(q, k, v, variant=chosen, return_lse=True, **options)

    first = attend(wl.flex(mask_mod=lambda b, h, i, j: j < 7))
    second = attend(wl.flex(mask_mod=lambda b, h, i, j: j >= 7))
    found = wl.merge_state(*first, *second, lse_base=lse_base)
    torch.testing.assert_close(found, attend(), atol=1e-5, rtol=1e-5)


def test_the_list_of_variants_is_whole() -> None:
    shipped = {
        name
        for name, home in wl._HOME.items()
        if home.startswith("warploom.dsl.library.") and isinstance(getattr(wl, name), type)
        if issubclass(getattr(wl, name), wl.Variant) and getattr(wl, name).softmax is not False
    }
    assert {type(x).__name__ for x in variants()} == shipped - {"AttentionSink"} | {"Variant"}


def test_a_sink_is_counted_once() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, HEADS, DIM)
    k, v = torch.randn(2, 2, KEYS, 2, DIM)
    sink = torch.randn(HEADS)
    with_sink = wl.AttentionSink(sink)
    out, lse = wl.attention(q, k, v, variant=with_sink, return_lse=True)

    def part(keys: slice, variant: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        kv = (x[:, keys].contiguous() for x in (k, v))
        return wl.attention(q, *kv, variant=variant, return_lse=True)

    first, second = part(slice(7)), part(slice(7, None))
    merged, sums = wl.merge_state(*first, *second)
    torch.testing.assert_close(sums, lse)
    # afterwards, as a state without values
    found, _ = wl.merge_state(merged, sums, torch.zeros_like(merged), sink.expand_as(sums))
    torch.testing.assert_close(found, out)
    # in one part, whose log-sum-exp then has it too
    o, s = part(slice(7), with_sink)
    found, all_sums = wl.merge_state(o, torch.logaddexp(s, sink), *second)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(all_sums, torch.logaddexp(lse, sink))
    # and in both it is too much
    twice, _ = wl.merge_state(o, s, *part(slice(7, None), with_sink))
    assert (twice - out).abs().max() > 0.01


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_any_type_of_floats(dtype: torch.dtype, rtol: float) -> None:
    v, s = states(7, 3, HEADS, DIM, dtype=dtype)
    s = s.double() if dtype == torch.float64 else s
    found, sums = wl.merge_states(v, s)
    assert found.dtype == dtype and sums.dtype == s.dtype
    expected, expected_sums = exact(v, s)
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(sums.double(), expected_sums, rtol=1e-6, atol=1e-6)
    narrow, _ = wl.merge_states(v.to(torch.float8_e5m2), s)
    assert narrow.dtype == torch.float8_e5m2


@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_empty_states_count_for_nothing(lse_base: str) -> None:
    v, s = states(6, 3, HEADS, DIM)
    s[0], v[0] = -INF, NAN  # no part saw a key
    s[1, 1], v[1, 1] = -INF, INF
    s[2, 1:] = -INF
    found, sums = wl.merge_states(v, s, lse_base=lse_base)
    assert (found[0] == 0).all() and (sums[0] == -INF).all()
    torch.testing.assert_close(found[2], v[2, 0])
    torch.testing.assert_close(sums[2], s[2, 0])
    assert found.isfinite().all() and sums[1:].isfinite().all()
    two, two_sums = wl.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base=lse_base)
    torch.testing.assert_close(two[2], v[2, 0])
    assert (two[0] == 0).all() and (two_sums[0] == -INF).all() and two.isfinite().all()


@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_infinite_and_nan_sums_are_those_of_torch(lse_base: str) -> None:
    v, s = states(5, 3, HEADS, DIM)
    s[0, 1] = INF
    s[1, :2] = INF
    s[2, 0], s[2, 1], v[2, 1] = INF, -INF, NAN
    s[3, 0], s[3, 1] = INF, NAN
    s[4, 2] = NAN
    expected = exact(v.nan_to_num(), s * (1.0 if lse_base == "e" else math.log(2)))
    found, sums = wl.merge_states(v, s, lse_base=lse_base)
    sums = sums if lse_base == "e" else sums * math.log(2)
    torch.testing.assert_close(found.double(), expected[0], equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), expected[1], equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.isnan(found).all() and torch.isposinf(sums[:3]).all() and sums[3:].isnan().all()
    two = wl.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base=lse_base)
    torch.testing.assert_close(two[1][:4].isposinf().all(1), torch.tensor([True] * 3 + [False]))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_parts_with_infinite_logits_merge_into_the_whole(backend: Any) -> None:
    torch.manual_seed(0)
    q = torch.rand(1, 5, HEADS, DIM)
    k, v = torch.rand(2, 1, KEYS, HEADS, DIM)
    k[:, 3, :2], k[:, 20, 1:3] = INF, INF
    k[:, 21, 2:] = NAN
    whole = wl.attention(q, k, v, return_lse=True, backend=backend)
    assert torch.isposinf(whole[1][..., :2]).all() and torch.isnan(whole[1][..., 2:]).all()
    parts = [
        wl.attention(
            q, k[:, a:b].contiguous(), v[:, a:b].contiguous(), return_lse=True, backend=backend
        )
        for a, b in ((0, 10), (10, KEYS))
    ]
    merged = wl.merge_state(*parts[0], *parts[1])
    torch.testing.assert_close(merged, whole, equal_nan=True)


def test_sums_have_the_type_they_are_computed_in() -> None:
    v, s = states(2, 2, HEADS, DIM)
    for of_values, of_sums, expected in (
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
    ):
        out, sums = wl.merge_states(v.to(of_values), s.to(of_sums))
        assert out.dtype == of_values and sums.dtype == expected
    _, sums = wl.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1].double())
    assert sums.dtype == torch.float64


def test_no_states_are_an_empty_one() -> None:
    v, s = states(2, 0, HEADS, DIM)
    found, sums = wl.merge_states(v, s)
    assert found.shape == (2, HEADS, DIM) and not found.any()
    assert sums.shape == (2, HEADS) and (sums == -INF).all()


@pytest.mark.parametrize("size", [1e4, -1e4, 3e38, -3e38])
def test_huge_sums(size: float) -> None:
    v, s = states(4, 2, HEADS, DIM)
    s = torch.full_like(s, size)
    found, sums = wl.merge_states(v, s)
    torch.testing.assert_close(found, v.mean(1))
    torch.testing.assert_close(sums, torch.full_like(sums, size) + math.log(2))


def test_base_2_is_base_e_scaled() -> None:
    v, s = states(4, 3, HEADS, DIM)
    expected = wl.merge_states(v, s)
    found, sums = wl.merge_states(v, s / math.log(2), lse_base="2")
    torch.testing.assert_close((found, sums * math.log(2)), expected)


@pytest.mark.parametrize("name", ["merge_state", "merge_states"])
def test_it_compiles_to_one_graph(name: str) -> None:
    merge = getattr(wl, name)
    v, s = states(4, 2, HEADS, DIM)
    given = (v, s) if name == "merge_states" else (v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    compiled = torch.compile(merge, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), merge(*given))


def test_it_is_differentiable() -> None:
    v, s = (x.double().requires_grad_() for x in states(2, 3, 2, 4))
    assert torch.autograd.gradcheck(lambda v, s: wl.merge_states(v, s), (v, s))
    first, second = ((v[:, i].detach(), s[:, i].detach()) for i in (0, 1))
    given = [x.requires_grad_() for x in (*first, *second)]
    assert torch.autograd.gradcheck(lambda *x: wl.merge_state(*x, lse_base="2"), given)


def test_gradients_of_empty_states_are_zero() -> None:
    v, s = states(3, 2, HEADS, DIM)
    s[0], s[1, 0], v[1, 0] = -INF, -INF, NAN
    v.requires_grad_()
    s.requires_grad_()
    found, sums = wl.merge_states(v, s)
    (found.sum() + sums[1:].sum()).backward()
    assert v.grad is not None and s.grad is not None
    assert v.grad.isfinite().all() and s.grad.isfinite().all()
    assert not v.grad[0].any() and not v.grad[1, 0].any() and not s.grad[0].any()


V, S = states(3, HEADS, DIM)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((V, S[:2], V, S), errors.WrongShape, r"s_a has shape \(2, 4\); expected \(3, 4\), as v_a"),
        ((V, S, V[:2], S[:2]), errors.WrongShape, r"v_b has shape .* as v_a"),
        ((V, S, V.half(), S), errors.WrongDType, "v_b has dtype torch.float16; expected torch.f"),
        ((V, S.int(), V, S), errors.WrongDType, "s_a has dtype torch.int32; expected a type of"),
        ((V, S, V.to("meta"), S.to("meta")), errors.WrongDevice, "v_b is on meta"),
        ((V, S.to("meta"), V, S), errors.WrongDevice, "s_a is on meta"),
        (([1.0], S, V, S), errors.ArgumentError, "v_a: a list is neither"),
    ],
)
def test_what_does_not_belong_together(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wl.merge_state(*given)


def test_axes_of_merge_states_and_the_base_are_checked() -> None:
    with pytest.raises(errors.WrongShape, match=r"\[rows, num_states, heads, dim\]"):
        wl.merge_states(V[0], S[0])
    with pytest.raises(errors.ArgumentError, match="lse_base: '10'"):
        wl.merge_states(V, S, lse_base="10")


def test_arrays_of_other_libraries_are_taken() -> None:
    found, _ = wl.merge_state(V.numpy(), S.numpy(), V.numpy(), S.numpy())
    torch.testing.assert_close(found, V)


def test_lists_of_states_are_told_to_be_stacked() -> None:
    v, s = [torch.zeros(3, 2, 8)] * 2, [torch.zeros(3, 2)] * 2
    with pytest.raises(errors.ArgumentError, match=r"v: is a list of .*: give torch.stack\(v, 1\)"):
        wl.merge_states(v, s)
    with pytest.raises(errors.ArgumentError, match=r"s: is a list of .*: give torch.stack\(s, 1\)"):
        wl.merge_states(torch.stack(v, 1), s)
    assert wl.merge_states(torch.stack(v, 1), torch.stack(s, 1))[0].shape == (3, 2, 8)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_head_without_a_sink_has_zeros_where_a_row_sees_nothing(backend: str | None) -> None:
    sink = torch.tensor([-math.inf, 0.0])
    attention = wl.AttentionWrapper(
        wl.AttentionSink(sink), num_q_heads=2, head_dim=8, dtype="float32", device="cpu",
        backend=backend,
    )  # fmt: skip
    attention.plan([0, 1, 2], [0, 3, 3])
    k, v = torch.randn(2, 3, 2, 8)
    out = attention.run(torch.randn(2, 2, 8), (k, v))
    assert out[0].isfinite().all() and out[0].any(-1).all() and not out[1].any()
