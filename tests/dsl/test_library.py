"""Each shipped variant against its formula written out by hand, its graph against its functor."""

from __future__ import annotations

import math

import numpy as np
import pytest

import warploom as wl
from warploom.dsl.reference import reference_attention, visible
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, MissingInput

RNG = np.random.default_rng(5)
ROWS, KEYS, Q_HEADS, KV_HEADS, DIM = 4, 9, 4, 2, 16
Q = RNG.normal(size=(ROWS, Q_HEADS, DIM))
K = RNG.normal(size=(KEYS, KV_HEADS, DIM))
V = RNG.normal(size=(KEYS, KV_HEADS, DIM))
Q_POS = np.arange(ROWS) + KEYS - ROWS
KV_POS = np.arange(KEYS)


def by_hand(logits=None, mask=None, q=Q, k=K, softmax=True, sink=None):
    """Attention head by head, row by row."""
    out = np.zeros((ROWS, Q_HEADS, DIM))
    for h in range(Q_HEADS):
        for i in range(ROWS):
            scores = np.array([q[i, h] @ k[j, h // 2] for j in range(KEYS)]) / math.sqrt(DIM)
            if logits is not None:
                scores = np.array([logits(scores[j], i, j, h) for j in range(KEYS)])
            seen = [j for j in range(KEYS) if mask is None or mask(Q_POS[i], j, i)]
            weights = scores[seen] if not softmax else np.exp(scores[seen])
            if softmax:
                weights = weights / (weights.sum() + (0 if sink is None else math.exp(sink[h])))
            for weight, j in zip(weights, seen, strict=True):
                out[i, h] += weight * V[j, h // 2]
    return out


def check(variant, expected, **request) -> None:
    out, _ = reference_attention(variant, Q, K, V, **request)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)


def test_causal() -> None:
    check(wl.Causal(), by_hand(mask=lambda q, k, i: k <= q))


@pytest.mark.parametrize(
    ("window", "mask"),
    [
        (wl.SlidingWindow(2), lambda q, k, i: k >= q - 2),
        (wl.SlidingWindow(2, 1), lambda q, k, i: q - 2 <= k <= q + 1),
        (wl.SlidingWindow(0, 0), lambda q, k, i: k == q),
        (wl.SlidingWindow(-1, 0), lambda q, k, i: k <= q),
        (wl.SlidingWindow(-1), lambda q, k, i: True),
        (wl.SlidingWindow(1, 0, sinks=2), lambda q, k, i: (k >= q - 1 or k < 2) and k <= q),
        (wl.SlidingWindow(1, sinks=4), lambda q, k, i: k >= q - 1 or k < 4),
        (wl.SlidingWindow(2**31 - 1, 2**31 - 1, sinks=3), lambda q, k, i: True),
    ],
)
def test_sliding_window(window, mask) -> None:
    check(window, by_hand(mask=mask))


def test_soft_cap() -> None:
    check(wl.SoftCap(1.5), by_hand(lambda s, i, j, h: 1.5 * math.tanh(s / 1.5)))


def paper_slopes(heads: int) -> list[float]:
    """The reference implementation's recursion."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return paper_slopes(closest) + paper_slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 20, 32, 40, 71])
def test_alibi_slopes(heads) -> None:
    from warploom.dsl.library.alibi import alibi_slope

    found = [float(alibi_slope(np.int64(head), np.int64(heads))) for head in range(heads)]
    np.testing.assert_allclose(found, paper_slopes(heads), rtol=1e-12)


def test_alibi() -> None:
    slopes = paper_slopes(Q_HEADS)
    expected = by_hand(lambda s, i, j, h: s + slopes[h] * (j - Q_POS[i]))
    check(wl.Alibi(), expected)
    check(wl.Alibi(np.array(slopes)), expected)
    check(wl.Alibi("input"), expected, inputs={"slopes": np.array(slopes)})
    with pytest.raises(MissingInput, match="slopes"):
        check(wl.Alibi("input"), expected)
    with pytest.raises(ArgumentError, match="'inputs'"):
        wl.Alibi("inputs")


# --- RoPE


def rotated(x, positions, frequencies, interleaved, dim=DIM, magnitude=1.0):
    """Pairs of lanes as complex numbers, turned by position x frequency."""
    out = x.copy()
    for row, position in enumerate(positions):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            turn = magnitude * np.exp(1j * position * frequencies[i])
            pair = (x[row, :, a] + 1j * x[row, :, b]) * turn
            out[row, :, a], out[row, :, b] = pair.real, pair.imag
    return out


def plain_frequencies(theta, dim=DIM):
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def llama3_frequencies(theta, factor, low, high, original):
    found = []
    for f in plain_frequencies(theta):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            found.append(f)
        elif wavelength > original / low:
            found.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return found


def yarn_frequencies(theta, factor, original, fast=32.0, slow=1.0):
    def dimension(turns):
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(fast)), 0)
    high = min(math.ceil(dimension(slow)), DIM - 1)
    found = []
    for i, f in enumerate(plain_frequencies(theta)):
        ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        found.append(f / factor * ramp + f * (1 - ramp))
    return found


ROPES = {
    "llama": ({}, plain_frequencies(1e4), False, 1.0),
    "interleaved": ({"interleaved": True}, plain_frequencies(1e4), True, 1.0),
    "theta": ({"theta": 5e5}, plain_frequencies(5e5), False, 1.0),
    "linear": (
        {"scaling": wl.LinearScaling(4.0)},
        [f / 4 for f in plain_frequencies(1e4)],
        False,
        1.0,
    ),
    "llama3": (
        {"theta": 500.0, "scaling": wl.Llama3Scaling(8.0, 1.0, 4.0, 128)},
        llama3_frequencies(500.0, 8.0, 1.0, 4.0, 128),
        False,
        1.0,
    ),
    "yarn": (
        {"scaling": wl.YarnScaling(4.0, 4096), "interleaved": True},
        yarn_frequencies(1e4, 4.0, 4096),
        True,
        0.1 * math.log(4.0) + 1,
    ),
    "yarn short": (
        {"theta": 100.0, "scaling": wl.YarnScaling(16.0, 64, magnitude=1.0)},
        yarn_frequencies(100.0, 16.0, 64),
        False,
        1.0,
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope(name) -> None:
    options, frequencies, interleaved, magnitude = ROPES[name]
    q = rotated(Q, Q_POS, frequencies, interleaved, magnitude=magnitude)
    k = rotated(K, KV_POS, frequencies, interleaved, magnitude=magnitude)
    check(wl.Rope(**options), by_hand(q=q, k=k))


def test_scaled_frequencies_are_a_mixture() -> None:
    """The cases above exercise every branch of the scaling rules."""
    plain = np.array(plain_frequencies(500.0))
    ratio = np.array(llama3_frequencies(500.0, 8.0, 1.0, 4.0, 128)) / plain
    assert ratio.max() == 1 and ratio.min() == 1 / 8 and ((ratio > 0.13) & (ratio < 0.99)).any()
    ratio = np.array(yarn_frequencies(1e4, 4.0, 4096)) / plain_frequencies(1e4)
    assert ratio.max() == 1 and ((ratio > 0.26) & (ratio < 0.99)).any()


def test_rope_at_real_positions() -> None:
    real = np.array([[0, 1, 2, 10, 11, 12, 40, 41, 50], [0] * KEYS], np.int32)
    q = rotated(Q, real[0, -ROWS:], plain_frequencies(1e4), False)
    k = rotated(K, real[0], plain_frequencies(1e4), False)
    check(wl.Rope(positions="sequence"), by_hand(q=q, k=k), inputs={"rope_positions": real})
    with pytest.raises(ArgumentError, match="positions: 'absolute' is neither 'cache' nor"):
        wl.Rope(positions="absolute")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_a_part_of_the_lanes(interleaved) -> None:
    frequencies = plain_frequencies(1e4, 8)
    q = rotated(Q, Q_POS, frequencies, interleaved, 8)
    k = rotated(K, KV_POS, frequencies, interleaved, 8)
    check(wl.Rope(dim=8, interleaved=interleaved), by_hand(q=q, k=k))


def test_rope_with_scaling_never_recompiles_for_new_numbers() -> None:
    one = wl.Rope(scaling=wl.Llama3Scaling(8.0))
    two = wl.Rope(theta=5e5, scaling=wl.Llama3Scaling(32.0, 1.0, 4.0, 4096))
    assert trace(one) == trace(two) != trace(wl.Rope())


# --- norms, sigmoid, sink


def test_qk_norm() -> None:
    q_weight, k_weight = RNG.normal(size=DIM), RNG.normal(size=DIM)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    variant = wl.QKNorm(q_weight, k_weight, eps=1e-5)
    check(variant, by_hand(q=norm(Q, q_weight), k=norm(K, k_weight)))
    q = rotated(norm(Q, q_weight), Q_POS, plain_frequencies(1e4), False)
    k = rotated(norm(K, k_weight), KV_POS, plain_frequencies(1e4), False)
    check(variant & wl.Rope(), by_hand(q=q, k=k))


def test_flash_sigmoid() -> None:
    def sigmoid(s, i, j, h):
        return 1 / (1 + math.exp(-(s * 0.7 - 1.2)))

    check(wl.FlashSigmoid(0.7, -1.2), by_hand(sigmoid, softmax=False))
    causal = by_hand(sigmoid, lambda q, k, i: k <= q, softmax=False)
    check(wl.FlashSigmoid(0.7, -1.2) & wl.Causal(), causal)
    assert not trace(wl.FlashSigmoid()).softmax


def test_attention_sink() -> None:
    sink = RNG.normal(size=Q_HEADS)
    check(wl.AttentionSink(sink), by_hand(sink=sink))
    empty = wl.AttentionSink(sink) & wl.flex(None, lambda b, h, q, k: k < 0)
    out, lse = reference_attention(empty, Q, K, V)
    assert np.all(out == 0) and np.all(np.isneginf(lse))


# --- masks that read tensors


def test_prefix_lm() -> None:
    variant = wl.PrefixLM(np.array([0, 7], np.int32))
    check(variant, by_hand(mask=lambda q, k, i: k <= q), batch=0)
    check(variant, by_hand(mask=lambda q, k, i: k < 7 or k <= q), batch=1)


def test_document_mask() -> None:
    ids = np.array([[0] * KEYS, [0, 0, 0, 1, 1, 1, 1, 2, 2]], np.int32)
    check(wl.DocumentMask(ids), by_hand(mask=lambda q, k, i: ids[1, q] == ids[1, k]), batch=1)


def test_packed_mask() -> None:
    masks = [RNG.random((3, 5)) < 0.5, RNG.random((ROWS, KEYS)) < 0.5, np.zeros((0, 4), bool)]
    bits, indptr = wl.pack_masks(masks)
    assert indptr.tolist() == [0, 2, 7, 7] and indptr.dtype == np.int32
    variant = wl.PackedMask(bits, indptr)
    assert np.array_equal(visible(variant, q_len=3, kv_len=5), masks[0])
    check(variant, by_hand(mask=lambda q, k, i: masks[1][i, k]), batch=1)


def test_tree_mask() -> None:
    parents = [-1, 0, 0, 1]
    tree = np.eye(4, dtype=bool)
    for row, parent in enumerate(parents):
        tree[row] |= tree[parent] if parent >= 0 else False
    bits, indptr = wl.pack_masks([tree])
    context = KEYS - ROWS
    expected = by_hand(mask=lambda q, k, i: k < context or tree[i, k - context])
    check(wl.TreeMask(bits, indptr), expected)


def test_masks_without_values_ask_for_them() -> None:
    for variant in (wl.PrefixLM(), wl.DocumentMask(), wl.PackedMask(), wl.TreeMask()):
        with pytest.raises(MissingInput):
            visible(variant, q_len=2, kv_len=2)


# --- graphs

POSITIONS = {
    "batch": 1,
    "q_len": ROWS,
    "kv_len": KEYS,
    "num_q_heads": Q_HEADS,
    "num_kv_heads": KV_HEADS,
    "q_head": 3,
    "kv_head": 1,
    "q_pos": Q_POS[:, None],
    "kv_pos": KV_POS[None],
    "q_row": np.arange(ROWS)[:, None],
}
TABLES = {
    "slopes": RNG.normal(size=Q_HEADS),
    "sink": RNG.normal(size=Q_HEADS),
    "prefix_len": np.array([3, 7]),
    "document_ids": RNG.integers(0, 3, (2, KEYS)),
    "rope_positions": RNG.integers(0, 99, (2, KEYS)),
    "packed_mask": RNG.integers(0, 256, 32),
    "mask_indptr": np.array([0, 5, 16]),
    "q_weight": RNG.normal(size=DIM),
    "k_weight": RNG.normal(size=DIM),
}
SHIPPED = {
    "causal": wl.Causal(),
    "window": wl.SlidingWindow(3, 1, 2),
    "soft_cap": wl.SoftCap(2.0),
    "alibi": wl.Alibi(),
    "alibi input": wl.Alibi("input"),
    "sigmoid": wl.FlashSigmoid(0.5, -1.0),
    "prefix": wl.PrefixLM(),
    "document": wl.DocumentMask(),
    "packed": wl.PackedMask(),
    "tree": wl.TreeMask(),
    "sink": wl.AttentionSink(),
    "norm": wl.QKNorm() & wl.Rope(interleaved=True),
    **{name: wl.Rope(**options) for name, (options, *_) in ROPES.items()},
    "partial rope": wl.Rope(dim=8, positions="sequence"),
    "gemma": wl.SlidingWindow(3) & wl.Causal() & wl.SoftCap(3.0) & wl.Rope(dim=8, interleaved=True),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_graphs_compute_what_the_functors_do(name, graph) -> None:
    from warploom.dsl.values.position import AVAILABLE, Position
    from warploom.dsl.variants.readings import NumpyReading

    variant = SHIPPED[name]
    fields = {
        **{n: f.default for n, f in variant.fields().items() if hasattr(f, "default")},
        **TABLES,
        **variant.inputs(),
    }
    shadow = variant.under(NumpyReading(variant.name, fields))
    for hook, root in trace(variant).hooks.items():
        columns = "kv_pos" in AVAILABLE[hook] and "lane" in AVAILABLE[hook]
        places = {**POSITIONS, "kv_pos": KV_POS[:, None]} if columns else dict(POSITIONS)
        shape = (ROWS, KEYS)
        if "lane" in AVAILABLE[hook]:
            shape = (KEYS if columns else ROWS, DIM)
            places |= {"lane": np.arange(DIM)[None], "head_dim": np.full((1, 1), DIM)}
            places |= {"lse": RNG.normal(size=(shape[0], 1))}
        value = RNG.normal(size=shape)
        given = () if hook == "logits_mask" else (value,)
        at = Position(hook, {key: np.asarray(place) for key, place in places.items()})
        expected = np.broadcast_to(np.asarray(getattr(shadow, hook)(*given, at)), shape)
        found = np.broadcast_to(graph(root, places, value=value, fields=fields), shape)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_scales_of_stored_keys_and_values() -> None:
    heads = {"k_scale": np.array([0.5, 3.0]), "v_scale": np.array([2.0, 0.25])}
    tokens = {name: RNG.uniform(0.1, 2.0, size=(1, KEYS, KV_HEADS)) for name in heads}

    def scaled(k_scale, v_scale):
        return reference_attention(wl.Causal(), Q, K * k_scale, V * v_scale)[0]

    check(wl.Causal() & wl.KVScale(0.5, 3.0), scaled(0.5, 3.0))
    expected = scaled(heads["k_scale"][:, None], heads["v_scale"][:, None])
    check(wl.Causal() & wl.HeadKVScale(heads["k_scale"], heads["v_scale"]), expected)
    check(wl.Causal() & wl.HeadKVScale(), expected, inputs=heads)
    expected = scaled(tokens["k_scale"][0, :, :, None], tokens["v_scale"][0, :, :, None])
    check(wl.TokenKVScale() & wl.Causal(), expected, inputs=tokens)
    with pytest.raises(MissingInput):
        check(wl.KVScale(k=0.5), expected)


@pytest.mark.parametrize("theta", [0.0, -1.0, math.inf, math.nan])
def test_a_base_of_frequencies_must_be_above_0(theta: float) -> None:
    with pytest.raises(ArgumentError, match=r"theta: .* is not above 0 and finite"):
        wl.Rope(theta)


@pytest.mark.parametrize("cap", [0.0, -30.0, math.inf, math.nan])
def test_a_soft_cap_must_be_above_0(cap: float) -> None:
    with pytest.raises(ArgumentError, match="leave SoftCap out to switch it off"):
        wl.SoftCap(cap)
