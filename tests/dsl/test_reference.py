"""The oracle against attention written out by hand, and the tolerance rule built on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import (
    naive_attention,
    reference_attention,
    reference_batch,
    visible,
)
from warploom.dsl.types.rounding import assert_close, rounder, tolerance
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, CannotTrace, FieldMisuse, WrongResult, WrongShape

RNG = np.random.default_rng(3)


def tensors(rows, keys, q_heads=4, kv_heads=2, dim=8, dim_v=16):
    return (
        RNG.normal(size=(rows, q_heads, dim)),
        RNG.normal(size=(keys, kv_heads, dim)),
        RNG.normal(size=(keys, kv_heads, dim_v)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_against_torch(causal) -> None:
    q, k, v = tensors(6, 6)
    tq, tk, tv = (torch.tensor(x).transpose(0, 1) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        tq, tk, tv, is_causal=causal, enable_gqa=True
    )
    out, lse = reference_attention(wl.Causal() if causal else wl.Variant(), q, k, v)
    np.testing.assert_allclose(out, expected.transpose(0, 1).numpy(), atol=1e-12)
    scores = q[:, 3] @ k[:, 1].T / math.sqrt(8)
    if causal:
        scores = np.where(np.tri(6) > 0, scores, -np.inf)
    np.testing.assert_allclose(lse[:, 3], np.log(np.exp(scores).sum(1)))


def test_torch_tensors_of_any_float_type_are_read() -> None:
    q, k, v = (torch.tensor(x).bfloat16().requires_grad_() for x in tensors(2, 3))
    out, _ = reference_attention(wl.Causal(), q, k, v)
    same, _ = reference_attention(wl.Causal(), *(x.detach().double().numpy() for x in (q, k, v)))
    assert np.array_equal(out, same) and out.dtype == np.float64


def test_rows_that_see_nothing() -> None:
    q, k, v = tensors(5, 3)
    out, lse = reference_attention(wl.Causal(), q, k, v)  # q_pos is -2, -1, 0, 1, 2
    assert np.all(out[:2] == 0) and np.all(np.isneginf(lse[:2])) and np.all(np.isfinite(lse[2:]))
    out, lse = reference_attention(wl.Causal(), q, k[:0], v[:0])
    assert out.shape == (5, 4, 16) and np.all(out == 0) and np.all(np.isneginf(lse))
    out, lse = reference_attention(wl.Causal(), q[:0], k, v)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_logits_of_minus_infinity_are_masked() -> None:
    q, k, v = tensors(3, 3)
    masked = wl.flex(lambda s, b, h, i, j: wl.where(i >= j, s, -math.inf))
    np.testing.assert_allclose(
        reference_attention(masked, q, k, v)[0], reference_attention(wl.Causal(), q, k, v)[0]
    )


def test_large_logits_do_not_overflow() -> None:
    q, k, v = tensors(2, 4)
    out, lse = reference_attention(wl.Variant(), q, k, v, sm_scale=1e5)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))


def test_scale_and_all_hooks() -> None:
    class All(wl.Variant):
        def query_transform(self, q, at):
            return q * 2.0 + at.q_pos

        def key_transform(self, k, at):
            return k - at.kv_pos + at.kv_head

        def value_transform(self, v, at):
            return v * wl.where(at.lane < at.head_dim // 2, 1.0, -1.0) + at.batch

        def logits_transform(self, logits, at):
            return wl.sin(logits) + 0.1 * at.q_head

        def output_transform(self, o, at):
            return o * at.lse + at.q_row

    q, k, v = tensors(2, 3, q_heads=2, kv_heads=1)
    out, lse = reference_attention(All(), q, k, v, sm_scale=0.3, batch=4, first_q_row=10)
    for i in range(2):
        for h in range(2):
            query = q[i, h] * 2 + (i + 1)
            scores = [math.sin(0.3 * query @ (k[j, 0] - j)) + 0.1 * h for j in range(3)]
            weights = np.exp(scores)
            log_sum = math.log(weights.sum())
            sign = np.where(np.arange(16) < 8, 1.0, -1.0)
            mixed = sum(w * (v[j, 0] * sign + 4) for j, w in enumerate(weights)) / weights.sum()
            np.testing.assert_allclose(lse[i, h], log_sum)
            np.testing.assert_allclose(out[i, h], mixed * log_sum + 10 + i)


def test_without_softmax_logits_are_weights() -> None:
    class Linear(wl.Variant):
        softmax = False

        def logits_mask(self, at):
            return at.kv_pos != 1

    q, k, v = tensors(2, 3, q_heads=1, kv_heads=1)
    out, lse = reference_attention(Linear(), q, k, v, sm_scale=1.0)
    expected = (q[:, 0] @ k[[0, 2], 0].T) @ v[[0, 2], 0]
    np.testing.assert_allclose(out[:, 0], expected)
    assert np.all(lse == 0)


def test_given_key_positions() -> None:
    """Columns of a block matrix: as if all other keys were hidden; columns past kv_len are none."""
    q, k, v = tensors(4, 12)
    columns = np.array([8, 9, 2, 3, 12, 13])
    padded = [np.concatenate([x, np.full_like(x[:2], 99.0)]) for x in (k, v)]
    out, lse = reference_attention(
        wl.Causal(), q, *(x[columns] for x in padded), kv_positions=columns, kv_len=12
    )
    listed = wl.flex(None, lambda b, h, i, j: (j == 8) | (j == 9) | (j == 2) | (j == 3))
    expected, expected_lse = reference_attention(wl.Causal() & listed, q, k, v)
    np.testing.assert_allclose(out, expected)
    np.testing.assert_allclose(lse, expected_lse)


def test_a_tensor_of_no_positions_is_read_by_nobody() -> None:
    """With no keys at all, a tensor of one element a position has none; a row of it sees no key."""

    class Late(wl.Variant):
        first = wl.Tensor("int32", axes=("q_pos",))

        def logits_mask(self, at):
            return at.kv_pos > self.first[at.q_pos]

    out, lse = reference_attention(Late(), *tensors(1, 0), inputs={"first": np.empty(0, np.int32)})
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a_part_of_the_rows() -> None:
    q, k, v = tensors(6, 9)
    whole, lse = reference_attention(wl.Causal() & wl.Alibi(), q, k, v)
    part, part_lse = reference_attention(
        wl.Causal() & wl.Alibi(), q[2:4], k, v, first_q_idx=2, q_len=6
    )
    np.testing.assert_allclose(part, whole[2:4])
    np.testing.assert_allclose(part_lse, lse[2:4])


def test_batches_are_lists_of_requests() -> None:
    class Marks(wl.Variant):
        def output_transform(self, o, at):
            return o * 0 + 100 * at.batch + at.q_row

    requests = [tensors(rows, keys) for rows, keys in ((2, 3), (0, 4), (3, 3))]
    out, lse = reference_batch(Marks(), *(list(part) for part in zip(*requests, strict=True)))
    assert [o[:, 0, 0].tolist() for o in out] == [[0, 1], [], [202, 203, 204]]
    assert [part.shape for part in lse] == [(2, 4), (0, 4), (3, 4)]
    low, _ = reference_batch(
        wl.Causal(), *(list(part) for part in zip(*requests, strict=True)), round_to="float16"
    )
    assert low[0].dtype == np.float32


def test_masks_as_arrays() -> None:
    assert np.array_equal(visible(wl.Causal(), q_len=3, kv_len=5), np.tri(3, 5, 2) > 0)

    class ByHead(wl.Variant):
        def logits_mask(self, at):
            return at.kv_pos < at.q_head

    assert visible(ByHead(), q_len=1, kv_len=4, q_head=2).tolist() == [[True, True, False, False]]


def test_wrong_results_are_refused_in_the_numpy_reading_too(placed) -> None:
    class Wrong(wl.Variant):
        def logits_mask(self, at):
            return at.kv_pos - at.q_pos

    with pytest.raises(
        WrongResult, match="logits_mask of Wrong returned values of int32"
    ) as caught:
        reference_attention(Wrong(), *tensors(2, 2))
    assert placed(caught.value, "def logits_mask")

    class Nothing(wl.Variant):
        def logits_transform(self, logits, at):
            pass

    with pytest.raises(WrongResult, match="values of object"):
        reference_attention(Nothing(), *tensors(2, 2))


# --- rounding and tolerance


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rounding_is_torchs(name) -> None:
    x = RNG.normal(size=500) * 10.0 ** RNG.integers(-9, 5, 500)
    x = np.concatenate([x, [0, np.inf, -np.inf]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = rounder(name)(x)
    expected = torch.tensor(x).to(getattr(torch, name)).float().numpy()
    assert np.array_equal(rounded, expected) and rounded.dtype == np.float32
    assert np.isnan(rounder(name)(np.array([np.nan])))[0]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("bfloat16", 1e-4, 2e-2), ("float32", 1e-9, 1e-5)]
)
def test_the_naive_twin_errs_by_its_precision(name, least, most) -> None:
    request = tensors(8, 64)
    exact, exact_lse = reference_attention(wl.Causal() & wl.SoftCap(5.0), *request)
    naive, naive_lse = naive_attention(wl.Causal() & wl.SoftCap(5.0), *request, round_to=name)
    assert least < np.abs(naive - exact).max() < most
    assert_close(naive, exact, naive, name)
    assert_close(naive_lse, exact_lse, naive_lse, name)


def test_the_naive_twin_computes_positions_in_single_precision() -> None:
    q, k, v = tensors(1, 1)
    far = {"kv_positions": [70000], "kv_len": 70001}
    exact, lse = reference_attention(wl.Rope(), q, k, v, **far)
    _, naive_lse = naive_attention(wl.Rope(), q, k, v, round_to="float32", **far)
    assert np.isfinite(exact).all()
    assert 0 < np.abs(naive_lse - lse).max() < 0.2


def test_assert_close() -> None:
    exact = np.array([0.0, 1.0, -np.inf])
    naive = np.array([0.0, 1.01, -np.inf])
    assert tolerance(exact, naive, "bfloat16") == pytest.approx(0.022)
    assert tolerance(exact, naive, "bfloat16", atol=0.0) == pytest.approx(0.02)
    assert_close(np.array([0.015, 1.0, -np.inf]), exact, naive, "bfloat16")
    inf = np.inf
    for wrong in ([0.03, 1.0, -inf], [0.0, 1.0, -1e30], [0.0, np.nan, -inf], [0.0, inf, -inf]):
        with pytest.raises(AssertionError, match="exceeds"):
            assert_close(np.array(wrong), exact, naive, "bfloat16")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros(2), exact, naive, "bfloat16")


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            ((1, 6, 4, 8), (5, 2, 8), (5, 2, 8)),
            r"q .*expected \[rows, heads, head_dim\] of one req",
        ),
        (
            ((6, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)),
            r"k .*expected \[keys, heads, .*k\[i\] and v\[i\]",
        ),
        (((6, 4, 8), (5, 2, 16), (5, 2, 8)), r"k .*expected head_dim 8, as q"),
        (((6, 4, 8), (5, 2, 8), (4, 2, 8)), r"v .*expected 5 keys and 2 heads, as k"),
        (((6, 4, 8), (5, 3, 8), (5, 3, 8)), r"q .*expected a multiple of k's 3 heads"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, text) -> None:
    with pytest.raises(WrongShape, match=text):
        reference_attention(wl.Causal(), *map(np.zeros, shapes))


def test_scalars_are_one_number() -> None:
    q = np.zeros((2, 1, 8))
    with pytest.raises(WrongShape, match=r"cap has shape \(2,\); expected one number"):
        reference_attention(wl.SoftCap(3.0), q, q, q, inputs={"cap": np.ones(2)})


class Reads(wl.Variant):
    window = wl.Scalar("int32", default=2)
    slopes = wl.Tensor("float32", ("q_head",))
    bias = wl.Tensor("float32", ("batch", "kv_pos"))
    gain = wl.Tensor("float32", ("lane",))

    def query_transform(self, q, at):
        return q * self.gain[at.lane]

    def logits_transform(self, logits, at):
        return logits + self.slopes[at.q_head] * self.bias[at.batch, at.kv_pos]

    def logits_mask(self, at):
        return at.kv_pos < self.window


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"slopes": np.zeros(3)}, WrongShape, r"slopes has shape \(3,\); expected \[q_head=2\]"),
        ({"bias": np.zeros((1, 9))}, WrongShape, "batch>=2, kv_pos>=5"),
        ({"bias": np.zeros((2, 4))}, WrongShape, "batch>=2, kv_pos>=5"),
        ({"bias": np.zeros(9)}, WrongShape, "batch>=2, kv_pos>=5"),
        ({"gain": np.zeros(9)}, WrongShape, "lane=8"),
        ({"bias": np.zeros((2, 0))}, WrongShape, "batch>=2, kv_pos>=5"),
        ({"window": 1.5}, FieldMisuse, "got 1.5; expected int32"),
        ([1], ArgumentError, r"inputs: is \[1\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(wrong, error, text) -> None:
    q, k, v = np.zeros((2, 2, 8)), np.zeros((5, 1, 8)), np.zeros((5, 1, 4))
    inputs = {"slopes": np.zeros(2), "bias": np.zeros((2, 5)), "gain": np.ones(8)}
    reference_attention(Reads(), q, k, v, batch=1, inputs=inputs)
    with pytest.raises(error, match=text):
        given = {**inputs, **wrong} if isinstance(wrong, dict) else wrong
        reference_attention(Reads(), q, k, v, batch=1, inputs=given)


def test_a_batch_has_as_many_keys_and_values_as_queries() -> None:
    one = [np.zeros((3, 2, 8))]
    for name, lists in (("k", (one, one * 2, one)), ("v", (one, one, []))):
        with pytest.raises(WrongShape, match=rf"{name} has shape .*; expected 1 entries, as q has"):
            wl.reference_batch(wl.Causal(), *lists)


def test_ints_of_floats_are_the_nearest_in_both_precisions() -> None:
    class Far(wl.Variant):
        def logits_mask(self, at):
            far = wl.to_int(wl.to_float(at.kv_pos) * 1e10)
            return (far <= 2**31 - 1) & (far + 1 < 2)

    q, k, v = np.zeros((1, 1, 8)), np.zeros((4, 1, 8)), np.eye(4)[:, None]
    for attend in (reference_attention, naive_attention):
        assert attend(Far(), q, k, v)[0][0, 0].tolist() == [0.25] * 4


def test_ints_of_single_numbers_wrap_as_others_do() -> None:
    class Hashed(wl.Variant):
        seed = wl.Scalar("int32")

        def logits_mask(self, at):
            return (wl.to_int(self.seed * 1e9) * 2 < 0) & (at.kv_pos == 3)  # it is -2

    q, k, v = np.zeros((1, 1, 8)), np.zeros((4, 1, 8)), np.eye(4)[:, None]
    for attend in (reference_attention, naive_attention):
        out, _ = attend(Hashed(), q, k, v, inputs={"seed": 3})
        assert out[0, 0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "difference",
    [
        lambda x, at: x - (at.q_pos > 3),
        lambda x, at: x + ((at.kv_pos > 1) - at.q_pos),
        lambda x, at: x + ((at.kv_pos > 1) - (at.q_pos > 1)),
        lambda x, at: x - True,
        lambda x, at: x + wl.to_float(True - at.q_pos),
    ],
)
def test_bools_are_not_subtracted_here_either(difference) -> None:
    class Odd(wl.Variant):
        def logits_transform(self, logits, at):
            return difference(logits, at)

    x = np.ones((3, 1, 8))
    with pytest.raises(CannotTrace, match=r"- of .*bool.*where"):
        reference_attention(Odd(), x, x, x)
    with pytest.raises(CannotTrace, match=r"- of .*bool.*where"):
        trace(Odd())
