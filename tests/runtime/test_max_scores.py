"""The largest score of each row: what `return_aux` asks for, as in FlexAttention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from support.composed_variants import EveryHook
from support.emulator import Emulator
from support.parts import compiled
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex

import warploom as wl
from warploom import errors
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.operators import custom_op
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

BOTH = wl.AuxRequest(lse=True, max_scores=True)
MAXIMA = wl.AuxRequest(max_scores=True)
ROUGH = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tensors(
    rows: int = 70, keys: int = 300, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in layout HND."""
    torch.manual_seed(rows + keys)
    q, k, v = (torch.randn(2, heads, n, 64) for heads, n in ((4, rows), (2, keys), (2, keys)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def declared(rows: int = 9, keys: int = 21, **options: Any) -> wl.AttentionWrapper:
    options = {"dtype": "float32", "device": "cpu", "max_scores": True, **options}
    wrapper = wl.AttentionWrapper(num_q_heads=4, num_kv_heads=2, head_dim=64, **options)
    wrapper.plan([0, rows], [0, keys])
    return wrapper


def ragged(rows: int = 9, keys: int = 21) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(rows)
    return torch.randn(rows, 4, 64), (torch.randn(keys, 2, 64), torch.randn(keys, 2, 64))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float = 0.125) -> torch.Tensor:
    """[rows, q heads, keys], without functors."""
    return torch.einsum("rhd,khd->rhk", q, k.repeat_interleave(2, 1)) * scale


MODS: dict[str, Any] = {
    "plain": lambda score, b, h, q_idx, kv_idx: score,
    "bias": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.02,
    "cap": lambda score, b, h, q_idx, kv_idx: 3.0 * torch.tanh(score / 3.0),
    "turned": lambda score, b, h, q_idx, kv_idx: score * -2.0 - h,
    "hides": lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx < 5, score, float("-inf")),
}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("mod", "dtype"),
    [*((mod, torch.float32) for mod in MODS), ("cap", torch.float16), ("bias", torch.bfloat16)],
)
def test_they_are_those_of_flex_attention(mod: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    # Some rows see nothing.
    mask = torch_flex.create_block_mask(
        lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx > 3), None, None, 70, 300, "cpu"
    )
    # flex_attention() refuses max_scores of CPU tensors; what it calls does not.
    o, lse, top = math_attention(q, k, v, MODS[mod], mask.as_tuple(), 0.125, {})
    variant = wl.flex(score_mod=MODS[mod], block_mask=mask)
    asked = torch_flex.AuxRequest(lse=True, max_scores=True)
    out, aux = wl.attention(q, k, v, variant=variant, layout="HND", return_aux=asked)
    assert isinstance(aux, wl.AuxOutput)
    assert aux.max_scores is not None and aux.lse is not None
    assert aux.max_scores.dtype == torch.float32 and aux.max_scores.shape == q.shape[:-1]
    assert torch.isneginf(aux.max_scores[:, :, :4]).all()
    torch.testing.assert_close(aux.max_scores, top * math.log(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aux.lse, lse * math.log(2), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out, o, atol=ROUGH[dtype], rtol=ROUGH[dtype])


class Sharp(wl.Variant):
    """Scores grow and fall along the keys, so that maxima move by little and by much."""

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return 1.5 * logits + wl.to_float(at.kv_pos % 50) * 0.3


FORMATS: dict[str, KVFormat] = {
    "ragged": wl.Ragged(),
    "dense": wl.Dense(),
    "dense HND": wl.Dense(layout="HND"),
    "paged": wl.Paged(16),
    "pages of 1": wl.Paged(1, layout="HND"),
    "blocks": wl.BlockSparse(block=(16, 8)),
    "composed": wl.Composed(4),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("kv_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [(Sharp(), "float32"), (wl.Causal() & wl.AttentionSink(), "bfloat16")],
    ids=["sharp", "sinks"],
)
def test_formats_on_a_cpu(kv_format: KVFormat, variant: wl.Variant, dtype: str) -> None:
    setup = Setup(kv_format, dtype, 64, 64, max_scores=True)
    for q_lens, kv_lens in (
        ((70, 70), (130, 130)),
        ((1, 1), (3000, 3000)),  # keys are split
        ((40, 40), (20, 20)),  # rows without a visible key
    ):
        case = Case(setup, q_lens, kv_lens, num_kv_heads=2, group_size=2, scale=3.0)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


def test_every_hook_of_rows_that_share_keys() -> None:
    setup = Setup(wl.Composed(4), "float32", 32, 32, max_scores=True)
    case = Case(setup, (1,) * 7, (70, 64, 90, 0, 81, 33, 66), num_kv_heads=2, group_size=2)
    found = mismatch(EveryHook(), case)
    assert found is None, found


ROWS16, TALL, ONE_ROW = TileConfig(16, 64, 4, 2), TileConfig(64, 32, 2, 2), TileConfig(1, 64, 2, 1)
GROUP, GROUPS = TileConfig(64, 64, 4, 2, "hopper", 2), TileConfig(128, 64, 8, 2, "hopper", 1)
TILES = {
    "16 rows": (ROWS16, wl.Ragged(), wl.Causal() & wl.Alibi()),
    "8 rows": (TileConfig(8, 64, 2, 2), wl.Ragged(), wl.Causal() & wl.Alibi()),
    "64 rows": (TALL, wl.Paged(4), Sharp()),
    "one row": (ONE_ROW, wl.Paged(16), Sharp()),
    "composed": (ROWS16, wl.Composed(4), Sharp()),
    "composed, tall": (TALL, wl.Composed(16), wl.Causal() & wl.SoftCap(5.0)),
    "one group": (GROUP, wl.Ragged(), Sharp()),
    "two groups": (GROUPS, wl.Paged(16), wl.Causal() & wl.Alibi()),
    "composed groups": (GROUPS, wl.Composed(16), Sharp()),
    "sinks": (GROUP, wl.Ragged(), wl.Causal() & wl.AttentionSink()),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", TILES)
def test_tiles_of_gpus(emulator: Emulator, name: str) -> None:
    tile, kv_format, variant = TILES[name]
    setup = Setup(kv_format, "bfloat16", 64, 64, tile=tile, max_scores=True)
    heads = {"num_kv_heads": 2, "group_size": 1 if tile.rows == 1 else 2}
    for emulator.order, (q_lens, kv_lens) in enumerate((
        ((1,) * 5, (70, 64, 90, 0, 33)),
        ((1,), (900,)),  # few items, whose keys are split
        ((70, 1, 0, 33), (130, 257, 40, 33)),
        ((90,), (40,)),  # rows without a visible key
    )):  # fmt: skip
        if tile.rows == 1 and max(q_lens) > 1:
            continue
        case = Case(setup, q_lens, kv_lens, scale=3.0, seed=emulator.order, **heads)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", [ONE_ROW, ROWS16, TALL, GROUP], ids=lambda tile: f"{tile.rows}")
def test_maxima_whose_products_vanish(emulator: Emulator, tile: TileConfig) -> None:
    """Differences of logits times the scale are 0, or less than a reference would follow."""
    check_scale(1e-37, tile)
    check_scale(1e-3, tile)


@pytest.mark.parametrize("scale", [1e-37, 1e-3, 0.0, -0.5, 1e20])
def test_any_scale_on_a_cpu(scale: float) -> None:
    check_scale(scale, None)


def check_scale(scale: float, tile: TileConfig | None) -> None:
    rows, keys = (1, 400) if tile == ONE_ROW else (9, 400)
    q, (k, v) = ragged(rows, keys)
    wrapper = wl.AttentionWrapper(
        num_q_heads=2, num_kv_heads=2, head_dim=64, device="cpu", max_scores=True, sm_scale=scale,
        dtype="float32" if tile is None else "float16", tile=tile,
    )  # fmt: skip
    wrapper.plan([0, rows], [0, keys])
    q, k, v = (x if tile is None else x.half() for x in (q[:, :2].contiguous(), k, v))
    expected = torch.einsum("rhd,khd->rhk", q.double(), k.double()).mul(scale).amax(-1)
    _, aux = wrapper.run(q, (k, v), return_aux=MAXIMA)
    assert aux.max_scores is not None and aux.lse is None
    torch.testing.assert_close(aux.max_scores.double(), expected, atol=0.0, rtol=1e-5)


def test_a_base_is_of_sums_alone() -> None:
    q, kv = ragged()
    _, natural = declared().run(q, kv, return_aux=BOTH)
    _, binary = declared(lse_base="2").run(q, kv, return_aux=BOTH)
    assert natural.lse is not None and binary.lse is not None
    torch.testing.assert_close(binary.lse, natural.lse / math.log(2))
    assert natural.max_scores is not None and binary.max_scores is not None
    assert torch.equal(binary.max_scores, natural.max_scores)
    torch.testing.assert_close(natural.max_scores, scores(q, kv[0]).amax(-1))


def test_what_is_not_asked_for_is_none() -> None:
    q, kv = ragged()
    wrapper = declared()
    out = wrapper.run(q, kv)
    for request in (wl.AuxRequest(), wl.AuxRequest(lse=True), MAXIMA, BOTH):
        got, aux = wrapper.run(q, kv, return_aux=request)
        assert torch.equal(got, out)
        assert (aux.lse is not None, aux.max_scores is not None) == request
    out, aux = wl.attention(*tensors(), layout="HND", return_aux=wl.AuxRequest(lse=True))
    assert aux.max_scores is None and aux.lse is not None
    _, aux = declared(max_scores=False).run(q, kv, return_aux=wl.AuxRequest(lse=True))
    assert aux.lse is not None


@pytest.mark.parametrize("backend", [None, "reference"])
def test_given_tensors(backend: Any) -> None:
    q, kv = ragged()
    wrapper = declared(backend=backend)
    _, made = wrapper.run(q, kv, return_aux=BOTH)
    assert made.lse is not None and made.max_scores is not None
    lse = torch.full((9, 8), 7.0)[:, ::2]
    top = torch.full((4, 9), 7.0).T
    out, aux = wrapper.run(q, kv, lse=lse, max_scores=top, return_aux=MAXIMA)
    assert aux.max_scores is top and aux.lse is None
    assert torch.equal(top, made.max_scores) and torch.equal(lse, made.lse)
    top.fill_(7.0)
    assert torch.equal(wrapper.run(q, kv, max_scores=top), out)
    assert torch.equal(top, made.max_scores)
    top.fill_(7.0)
    for _ in range(2):  # runs that do not ask write nothing more
        wrapper.run(q, kv, return_lse=True)
    assert (top == 7.0).all()


def test_no_requests_and_no_rows() -> None:
    q, k, v = (x[:0] for x in tensors())
    out, aux = wl.attention(q, k, v, layout="HND", return_aux=BOTH)
    assert aux.max_scores is not None and aux.lse is not None
    assert out.shape == q.shape and aux.max_scores.shape == aux.lse.shape == q.shape[:-1]
    q, k, v = (x[:, :, :0] for x in tensors())
    _, aux = wl.attention(q, k, v, layout="HND", return_aux=MAXIMA)
    assert aux.max_scores is not None and aux.max_scores.shape == (2, 4, 0)


class Later(NamedTuple):
    """A request as torch may have it one day."""

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False


def test_requests_that_do_not_fit() -> None:
    q, kv = ragged()
    wrapper = declared()
    assert wrapper.run(q, kv, return_aux=Later(lse=True))[1].lse is not None
    for request, text in (
        (Later(entropy=True), "return_aux: asks for entropy; there are lse and max_scores"),
        (True, "return_aux: is True; expected warploom.AuxRequest"),
        (("lse",), "return_aux: is .*; expected warploom.AuxRequest"),
        (wl.AuxRequest(lse=1), r"return_aux\.lse: is 1; expected True or False"),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            wrapper.run(q, kv, return_aux=request)  # type: ignore[call-overload]
        with pytest.raises(errors.ArgumentError, match=text):
            wl.attention(*tensors(), layout="HND", return_aux=request)  # type: ignore[call-overload]
    with pytest.raises(errors.ArgumentError, match="return_lse: is part of return_aux"):
        wrapper.run(q, kv, return_lse=True, return_aux=BOTH)  # type: ignore[call-overload]
    with pytest.raises(errors.ArgumentError, match="return_lse: is part of return_aux"):
        wl.attention(*tensors(), layout="HND", return_lse=True, return_aux=BOTH)  # type: ignore[call-overload]


def test_what_was_not_declared_is_refused() -> None:
    q, kv = ragged()
    wrapper = declared(max_scores=False)
    askings: list[dict[str, Any]] = [{"return_aux": BOTH}, {"max_scores": torch.empty(9, 4)}]
    for asking in askings:
        with pytest.raises(errors.ArgumentError, match=r"max_scores: .*declare .*max_scores=True"):
            wrapper.run(q, kv, **asking)
    with pytest.raises(errors.ArgumentError, match="max_scores: is 1; expected True or False"):
        declared(max_scores=1)


def test_sums_without_softmax_have_none() -> None:
    with pytest.raises(errors.UnsupportedSpec, match=r"max_scores of FlashSigmoid .*softmax = F"):
        declared(variant=wl.FlashSigmoid())
    with pytest.raises(errors.UnsupportedSpec, match="max_scores of FlashSigmoid"):
        wl.attention(*tensors(), variant=wl.FlashSigmoid(), layout="HND", return_aux=MAXIMA)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_wrong_tensors_are_refused(backend: Any) -> None:
    q, kv = ragged()
    wrapper = declared(backend=backend)
    both = torch.empty(2, 9, 4)
    for given, error, text in (
        ({"max_scores": torch.empty(4, 9)}, errors.WrongShape, r"max_scores .*\(9, 4\)"),
        ({"max_scores": torch.empty(9, 4).half()}, errors.WrongDType, "max_scores .*float32"),
        ({"max_scores": torch.empty(9, 1).expand(9, 4)}, errors.WrongStride, "that overlap"),
        ({"max_scores": q.view(-1)[:36].view(9, 4)}, errors.ArgumentError, "memory of q"),
        ({"max_scores": both[0], "lse": both[0]}, errors.ArgumentError, "memory of lse"),
        ({"max_scores": [1.0]}, errors.ArgumentError, "max_scores: a list is neither"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            wrapper.run(q, kv, return_aux=MAXIMA, **given)
    wrapper.run(q, kv, return_aux=MAXIMA, max_scores=both[0], lse=both[1])


def test_they_know_their_kernels() -> None:
    """Kernels that tell nothing are as they were."""
    plain, telling = declared(max_scores=False), declared()
    texts = [compiled(wrapper).kernels.source(wrapper.choice).text for wrapper in (plain, telling)]  # type: ignore[arg-type]
    assert "max_scores" not in texts[0]
    assert "float* max_scores;" in texts[1]
    others = [line for line in texts[1].splitlines() if "max_scores" not in line]
    assert others == texts[0].splitlines()


def test_selections_tell_them_too() -> None:
    torch.manual_seed(0)
    cache = torch.randn(8, 2, 4, 2, 64)  # pages, k and v, tokens, heads
    selection = torch.tensor([[[5, 2], [1, 7]]], dtype=torch.int32)
    wrapper = wl.PageSelectionWrapper(
        kv_format=wl.Paged(4), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
        device="cpu", max_scores=True,
    )  # fmt: skip
    wrapper.plan([0, 1], [0, 2], selection, [3])
    q = torch.randn(1, 4, 64)
    keys = [cache[pages, 0, :, head].reshape(-1, 64) for head, pages in enumerate(selection[0])]
    k = torch.stack(keys, 1)[:7]
    _, aux = wrapper.run(q, cache, return_aux=MAXIMA)
    torch.testing.assert_close(aux.max_scores, scores(q, k).amax(-1))


def test_compiled_graphs() -> None:
    q, kv = ragged()
    wrapper, top = declared(), torch.empty(9, 4)
    _, eager = wrapper.run(q, kv, return_aux=BOTH)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, top: torch.Tensor) -> Any:
        out, aux = wrapper.run(q, (k, v), return_aux=BOTH, max_scores=top)
        dense = (x.transpose(0, 1)[None] for x in (q, k, v))
        asked = torch_flex.AuxRequest(max_scores=True)
        other, maxima = wl.attention(*dense, layout="HND", return_aux=asked)
        return out, aux.lse, aux.max_scores, other, maxima.max_scores

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    out, lse, maxima, other, of_call = compiled(q, *kv, top)
    torch.testing.assert_close(lse, eager.lse)
    torch.testing.assert_close(maxima, eager.max_scores)
    torch.testing.assert_close(top, eager.max_scores)
    torch.testing.assert_close(other[0].transpose(0, 1), out)
    torch.testing.assert_close(of_call[0].T, eager.max_scores)
    with pytest.raises(Exception, match=r"ArgumentError.*max_scores"):
        torch.compile(layer, backend="eager", fullgraph=True)(q, *kv, top[:1])


def test_operators_know_their_shapes() -> None:
    wrapper = declared()
    q, (k, v) = ragged()
    for asked in (MAXIMA, BOTH, wl.AuxRequest()):
        args = (q, k, v, *([],) * 4, "", wrapper.handle, *asked, [])
        torch.library.opcheck(custom_op.run_op, args, test_utils=("test_schema", "test_faketensor"))


def test_no_gradient_of_maxima() -> None:
    q, k, v = tensors()
    q.requires_grad_()
    _, aux = wl.attention(q, k, v, layout="HND", return_aux=BOTH)
    assert aux.max_scores is not None
    with pytest.raises(errors.NoGradient):
        aux.max_scores.sum().backward()
