"""FlexAttention's callables: captures become inputs, both readings agree with torch's own."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import warploom as wl
from warploom.dsl.reference import reference_attention, visible
from warploom.dsl.types.ir import walk
from warploom.dsl.variants.trace import trace
from warploom.errors import (
    ArgumentError,
    BranchOnSymbol,
    CannotTrace,
    GlobalMutated,
    ImpureFunctor,
    NoNumber,
    WrongResult,
    WrongSignature,
)

HEADS, TOKENS, DIM = 4, 12, 8
GLOBAL_SLOPES = torch.linspace(0.1, 1.0, HEADS)
NUMPY_SLOPES = np.linspace(-1.0, 1.0, HEADS)  # float64, as NumPy makes them
GLOBAL_OFFSETS, GLOBAL_OFFSET = torch.arange(HEADS), torch.tensor(-1)
CALLS = 0


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def global_bias(score, b, h, q_idx, kv_idx):
    return score + GLOBAL_SLOPES[h] * (kv_idx - q_idx)


def numpy_bias(score, b, h, q_idx, kv_idx):
    return score + NUMPY_SLOPES[h]


def _closures():
    bias = torch.randn(1, HEADS, TOKENS, TOKENS)
    documents = torch.randint(0, 3, (TOKENS,))
    distances = torch.randn(HEADS, 2 * TOKENS)
    scale, cap = 0.7, torch.tensor(3.0)

    def whole(score, b, h, q_idx, kv_idx):
        return torch.tanh(score / cap) * cap * scale + bias[b, h, q_idx, kv_idx]

    def stepwise(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx > 3, score + bias[0][h][q_idx, kv_idx], score * 0.5)

    def document(b, h, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) | (kv_idx < 2)

    def relative(score, b, h, q_idx, kv_idx):
        return score + distances[h, q_idx - kv_idx] * distances[-1 - h][kv_idx - q_idx]

    def recent(b, h, q_idx, kv_idx):
        return distances[0, q_idx - kv_idx] > -0.5

    return whole, stepwise, document, relative, recent


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(HEADS))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self.scale + self.bias[h]


def _with_default(score, b, h, q_idx, kv_idx, table=torch.randn(TOKENS)):  # noqa: B008
    return score + table[q_idx]


def _helper(table, h):
    return table[h] * GLOBAL_SLOPES[h]


def _cases():
    whole, stepwise, document, relative, recent = _closures()
    model = Model()
    table = torch.randn(HEADS)
    return {
        "closure": (whole, causal),
        "stepwise": (stepwise, None),
        "from the end": (relative, lambda b, h, q, k: recent(b, h, q, k) | (q == k)),
        "global": (global_bias, document),
        "method": (model.score_mod, causal),
        "lambda": (lambda s, b, h, q, k: s + table[h] + model.bias[h].exp(), None),
        "partial": (functools.partial(_with_default, table=torch.randn(TOKENS)), None),
        "default": (_with_default, causal),
        "helper": (lambda s, b, h, q, k: s + _helper(table, h), None),
        "and_masks": (None, torch_flex.and_masks(causal, document)),
        "or_masks": (None, torch_flex.or_masks(causal, document, lambda b, h, q, k: k == 5)),
        "inf": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), None),
        "logical": (None, lambda b, h, q, k: torch.logical_and(q >= k, q - k <= 4)),
    }


CASES = _cases()


def _torch_result(score_mod, mask_mod, q, k, v):
    mask = None
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(
            mask_mod, 1, HEADS, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=TOKENS
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, aux = torch_flex.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, return_lse=True
        )
    return out[0].transpose(0, 1).detach().numpy(), aux[0].T.detach().numpy()


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_agrees_with_torch(case) -> None:
    score_mod, mask_mod = CASES[case]
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3))
    expected, expected_lse = _torch_result(score_mod, mask_mod, q, k, v)
    given = (x[0].transpose(0, 1) for x in (q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = reference_attention(wl.flex(score_mod, mask_mod), *given)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_graph_agrees_with_the_oracle(case, graph) -> None:
    variant = wl.flex(*CASES[case])
    fields = {
        name: value.detach().numpy() if hasattr(value, "detach") else value
        for name, value in variant.inputs().items()
    }
    positions = {
        "batch": np.zeros((1, 1), int),
        "q_head": np.full((1, 1), 2),
        "q_len": TOKENS,
        "kv_len": TOKENS,
        "q_pos": np.arange(TOKENS)[:, None],
        "kv_pos": np.arange(TOKENS)[None],
    }
    hooks = trace(variant).hooks
    if "logits_mask" in hooks:
        mask = graph(hooks["logits_mask"], positions, fields=fields)
        expected = visible(variant, q_len=TOKENS, kv_len=TOKENS, q_head=2)
        assert np.array_equal(np.broadcast_to(mask, expected.shape), expected)
    if "logits_transform" in hooks:
        logits = np.random.default_rng(0).normal(size=(TOKENS, TOKENS))
        by_torch = CASES[case][0](
            torch.tensor(logits),
            torch.tensor(0),
            torch.tensor(2),
            torch.arange(TOKENS)[:, None],
            torch.arange(TOKENS)[None],
        )
        found = graph(hooks["logits_transform"], positions, value=logits, fields=fields)
        np.testing.assert_allclose(found, by_torch.detach().numpy(), atol=1e-5)


def test_captured_tensors_are_inputs_and_numbers_are_constants() -> None:
    whole, stepwise, *_ = _closures()
    variant = wl.flex(whole)
    assert set(variant.inputs()) == {"bias", "cap"}
    assert [(f.name, f.dtype.name, f.axes) for f in trace(variant).tensors] == [
        ("bias", "float32", (None,) * 4)
    ]
    assert [f.name for f in trace(variant).scalars] == ["cap"]
    assert variant.name == "flex_whole"
    assert trace(wl.flex(stepwise)) == trace(wl.flex(stepwise))


def test_a_new_tensor_of_the_same_shape_keeps_the_trace() -> None:
    def make(tensor, factor):
        def biased(score, b, h, q_idx, kv_idx):
            return score + tensor[h] * factor

        return wl.flex(biased)

    assert trace(make(torch.ones(4), 2.0)) == trace(make(torch.zeros(4), 2.0))
    assert trace(make(torch.ones(4), 2.0)) != trace(make(torch.ones(4), 3.0))


def test_numpy_captures_and_types_without_a_kernel_twin_are_converted() -> None:
    variant = wl.flex(numpy_bias)
    assert variant.inputs()["NUMPY_SLOPES"].dtype == np.float32
    wide = torch.zeros(4, dtype=torch.float64)
    assert wl.flex(lambda s, b, h, q, k: s + wide[h]).inputs()["wide"].dtype == torch.float32
    unsigned = torch.zeros(4, dtype=torch.uint32)
    assert wl.flex(lambda s, b, h, q, k: s + unsigned[h]).inputs()["unsigned"].dtype == torch.int64
    short = np.zeros(4, np.int16)
    assert wl.flex(None, lambda b, h, q, k: short[h] == 0).inputs()["short"].dtype == np.int16


def test_captured_tensors_are_read_anew_each_time() -> None:
    cap, wide, short = torch.tensor(2.0), torch.zeros(4, dtype=torch.float64), np.zeros(4, np.int16)
    variant = wl.flex(lambda s, b, h, q, k: s * cap + wide[h] + short[h])
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM) for _ in range(3))
    before = wl.attention(q, k, v, variant=variant)
    with torch.no_grad():
        cap.fill_(5.0)
        wide += torch.arange(4)
    short[2] = 7
    inputs = variant.inputs()
    assert inputs["cap"] == 5.0
    assert inputs["wide"].tolist() == [0, 1, 2, 3] and inputs["short"].tolist() == [0, 0, 7, 0]
    after = wl.attention(q, k, v, variant=variant)
    assert not torch.allclose(before, after)
    expected = wl.attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(after, expected)


def test_sizes_of_captured_tensors_are_known_and_negative_indices_count_from_the_end() -> None:
    table = torch.arange(6)

    def last(b, h, q_idx, kv_idx):
        size = table.shape[0] + len(table) + table.size(0) + table.ndim
        return (table[-1] == 5) & (kv_idx < size)

    assert visible(wl.flex(None, last), q_len=1, kv_len=20)[0].sum() == 19


@pytest.mark.parametrize(
    ("index", "wraps"),
    [
        (lambda b, h, q, k: b + h, False),
        (lambda b, h, q, k: q, "position"),
        (lambda b, h, q, k: 4 * q + k % 4, "position"),
        (lambda b, h, q, k: k // 8 + (q >> 2), "position"),
        (lambda b, h, q, k: abs(q - k), False),
        (lambda b, h, q, k: torch.clamp(q - k, 0, 5), False),
        (lambda b, h, q, k: (q - k) & 7, False),
        (lambda b, h, q, k: (k / 2).int(), False),
        (lambda b, h, q, k: q - k + 8, True),
        (lambda b, h, q, k: -1 - h, True),
        (lambda b, h, q, k: GLOBAL_OFFSETS[h], True),
        (lambda b, h, q, k: GLOBAL_OFFSET + k, True),
    ],
)
@pytest.mark.parametrize("q_idx", ["row", "position"])
def test_only_indices_that_may_be_negative_cost_a_selection(index, wraps, q_idx) -> None:
    table = torch.randn(64)
    variant = wl.flex(lambda s, b, h, q, k: s + table[index(b, h, q, k)], q_idx=q_idx)
    root = trace(variant).hooks["logits_transform"]
    found = any(node.op == "select" for node in walk(root))
    # rows before the first key have negative positions, but no negative numbers
    assert found == (wraps if isinstance(wraps, bool) else wraps == q_idx)


def test_numpy_numbers_count_from_the_end_too() -> None:
    table = torch.arange(6)
    last = wl.flex(None, lambda b, h, q, k: table[np.int64(-1)] == k)
    assert np.flatnonzero(visible(last, q_len=1, kv_len=9)[0]).tolist() == [5]
    (load,) = (node for node in walk(trace(last).hooks["logits_mask"]) if node.op == "load")
    assert load.args[0].attr == 5


def test_numbers_out_of_tensors_made_inside_are_constants_but_tables_are_refused() -> None:
    variant = wl.flex(lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(-1.0)))
    assert variant.inputs() == {}
    with pytest.raises(ImpureFunctor, match="tensors made inside"):
        wl.flex(lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0])[h])


def test_a_block_mask_stands_for_its_function() -> None:
    block_mask = torch_flex.create_block_mask(causal, None, None, 128, 128, device="cpu")
    assert trace(wl.flex(None, block_mask)) == trace(wl.flex(None, causal))


def test_flex_composes() -> None:
    both = wl.flex(global_bias) & wl.SlidingWindow(4)
    assert set(both.inputs()) == {"GLOBAL_SLOPES", "left", "right"}
    assert list(trace(both).hooks) == ["logits_transform", "logits_mask"]
    assert trace(wl.flex()).hooks == {}


@pytest.mark.parametrize(
    ("mods", "expected"),
    [
        ({"score_mod": causal}, r"score_mod of flex takes \(b, h, q_idx, kv_idx\)"),
        ({"score_mod": causal}, r"or is it a mask\? Then pass it as mask_mod=\.\.\.\."),
        ({"mask_mod": global_bias}, r"mask_mod of flex takes \(score, b, h, q_idx, kv_idx\)"),
    ],
)
def test_wrong_signatures(mods, expected, source) -> None:
    with pytest.raises(WrongSignature, match=expected) as caught:
        wl.flex(**mods)
    assert "def " in source(caught.value).text


def test_wrong_results_and_branches_point_into_the_function(placed) -> None:
    def score(score, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    with pytest.raises(WrongResult, match="score_mod of flex_score returned a bool") as e:
        wl.flex(score)
    assert placed(e.value, "q_idx >= kv_idx")
    with pytest.raises(WrongResult, match="returned an int32; expected a bool"):
        wl.flex(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx)

    def branching(b, h, q_idx, kv_idx):
        return kv_idx if h > 3 else q_idx

    with pytest.raises(BranchOnSymbol) as caught:
        wl.flex(None, branching)
    assert placed(caught.value, "h > 3")


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda t, h: t[:, :, h], "slicing it"),
        (lambda t, h: t[h:], "slicing it"),
        (lambda t, h: t[h].T[0], "attribute .T"),
        (lambda t, h: t[h, h, h], "3 of 2 indices"),
        (lambda t, h: (t + 1)[h, h], "computing with the whole"),
        (lambda t, h: t.sum(), ".sum"),
        (lambda t, h: torch.exp(t)[h, h], "torch.exp"),
        (lambda t, h: 2.0 * h + t, "'table' of shape (4, 4): computing with the whole"),
        (lambda t, h: t == 3.0, "computing with the whole"),
    ],
)
def test_captured_tensors_are_only_indexed(use, names, source) -> None:
    table = torch.zeros(4, 4)

    def score(score, b, h, q_idx, kv_idx):
        return score + use(table, h)

    with pytest.raises(CannotTrace) as caught:
        wl.flex(score)
    assert names in str(caught.value)
    assert source(caught.value).file == __file__


def test_a_function_that_changes_a_global_is_refused(source) -> None:
    def counts(b, h, q_idx, kv_idx):
        global CALLS
        CALLS += 1
        return q_idx >= kv_idx

    with pytest.raises(GlobalMutated, match="'CALLS'"):
        wl.flex(None, counts)

    def counts_and_captures(score, b, h, q_idx, kv_idx):
        global CALLS
        CALLS += 1
        return score + GLOBAL_SLOPES[h]

    with pytest.raises(GlobalMutated, match="'CALLS'") as caught:
        wl.flex(counts_and_captures)
    assert "CALLS += 1" in source(caught.value).text


def test_rows_are_counted_from_the_first_or_stand_among_the_keys() -> None:
    rows = visible(wl.flex(None, causal), q_len=1, kv_len=9)
    places = visible(wl.flex(None, causal, q_idx="position"), q_len=1, kv_len=9)
    assert (rows.sum(), places.sum()) == (1, 9)
    with pytest.raises(ArgumentError, match="neither 'row' nor 'position'"):
        wl.flex(None, causal, q_idx="end")  # type: ignore[arg-type]


def test_item_of_what_is_read_is_told_to_be_left_out(placed) -> None:
    slopes = torch.arange(4.0)
    with pytest.raises(NoNumber, match=r"Leave it out: what is read from a tensor") as caught:
        wl.flex(lambda s, b, h, i, j: s + slopes[h].item())
    assert placed(caught.value, "slopes[h].item")


def test_drawing_random_numbers_is_named() -> None:
    with pytest.raises(CannotTrace, match="draw no random numbers"):
        wl.flex(lambda s, b, h, i, j: s + torch.rand(1))
