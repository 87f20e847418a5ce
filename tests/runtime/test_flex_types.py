"""Captured tensors of small types mean what they mean to torch: each mod in both libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.typed_mods import MODS, ROWS, Mod, bytes_, c, c2, left, s, s2, scored, u, u2, where
from torch.nn.attention.flex_attention import flex_attention

import warploom as wl
from warploom import errors
from warploom.dsl.reference import reference_attention
from warploom.dsl.types.dtypes import dtype as dtype_named
from warploom.dsl.types.spec import TensorField
from warploom.runtime.inputs import values

KEYS, DIM = ROWS, 8
long = torch.zeros(ROWS, 65)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(7)
    q = torch.randn(1, 2, ROWS, DIM, generator=rng)
    k, v = (torch.randn(1, 2, KEYS, DIM, generator=rng) for _ in range(2))
    return q, k, v


def of_torch(mod: Mod, **mask: Any) -> torch.Tensor:
    """Out of torch's own FlexAttention, [1, rows, heads, dim]."""
    return flex_attention(*tensors(), score_mod=mod, **mask).transpose(1, 2)  # type: ignore[union-attr]


def of_warploom(variant: wl.Variant) -> torch.Tensor:
    return wl.attention(*(x.transpose(1, 2) for x in tensors()), variant=variant)


def of_oracle(variant: wl.Variant) -> Any:
    q, k, v = (x[0].transpose(0, 1) for x in tensors())
    return reference_attention(variant, q, k, v)[0][None]


@pytest.mark.some(10)
@pytest.mark.parametrize("name", MODS)
def test_score_mods_compute_what_torch_computes(name: str) -> None:
    mod = scored(MODS[name])
    expected = of_torch(mod)
    variant = wl.flex(mod)
    np.testing.assert_allclose(of_warploom(variant), expected, atol=2e-5)
    np.testing.assert_allclose(of_oracle(variant), expected, atol=2e-5)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["difference", "Python ints", "where", "remainders", "powers"])
def test_masks_compute_what_torch_computes(name: str) -> None:
    """Through tile analysis, which must know of the wrapping."""
    number = MODS[name]
    for bound in (-100, 0, 3, 60):

        def mask(b: Any, h: Any, i: Any, j: Any, bound: int = bound) -> Any:
            return (number(i, j) > bound) | (i == j)

        def as_score(score: Any, b: Any, h: Any, i: Any, j: Any, mask: Mod = mask) -> Any:
            return where(mask(b, h, i, j), score, -float("inf"))

        found = of_warploom(wl.flex(None, mask))
        np.testing.assert_allclose(found, of_torch(as_score), atol=2e-5)


def test_masks_of_requests_wrap_in_the_analysis() -> None:
    """Of one value in a tile, the analysis knows what it becomes; no tile may be skipped by it."""
    first = torch.tensor([250], dtype=torch.uint8)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j >= first[b] + 10  # 4

    def as_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return where(mask(b, h, i, j), score, -float("inf"))

    np.testing.assert_allclose(of_warploom(wl.flex(None, mask)), of_torch(as_score), atol=2e-5)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_mask_of_the_tiles_that_rows_select(axis: int) -> None:
    """A value with an axis more meets each element of a row."""
    tiles = torch.stack([torch.randperm(6)[:2] for _ in range(6)]).int()

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        tile = (j // 4).unsqueeze(-1) if axis else torch.unsqueeze(j // 4, 0)
        return (tiles[i // 4] == tile).any(dim=axis)

    def as_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return where(mask(b, h, i, j), score, -float("inf"))

    expected, variant = of_torch(as_score), wl.flex(None, mask)
    np.testing.assert_allclose(of_warploom(variant), expected, atol=2e-5)
    np.testing.assert_allclose(of_oracle(variant), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda i, j: where(u[i] > 3, u[i], 300), "300 as uint8 .*hold"),
        (lambda i, j: where(u[i] > 3, -256, u[i]), "-256 as uint8"),
        (lambda i, j: c[i].clamp(min=-200), "-200 as int8 .*widen the int8 first"),
        (lambda i, j: u[i] ** u[j], "a power of uint8 .*x.int"),
        (lambda i, j: u[i] ** 300, "a power of uint8"),
    ],
)
def test_what_torch_refuses_or_no_kernel_has_is_refused_by_name(mod: Mod, text: str) -> None:
    with pytest.raises(errors.CannotTrace, match=text):
        wl.flex(scored(mod))


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda i, j: (left[i] * bytes_[j]).sum(-1), "a row of another length, 3"),
        (lambda i, j: left[i] @ bytes_[j], r"a product \(@\) with a row of another length"),
        (lambda i, j: left[i], "a row of 6 numbers|the whole"),
        (lambda i, j: left[i].sum(1), "dim=1"),
        (lambda i, j: (long[i] * long[j]).sum(-1), r"unrolled.*torch\.cat\(\(q, q_extra"),
        (lambda i, j: left.sum(-1)[i], "the whole of it"),
        (lambda i, j: (left[i] * j.unsqueeze(1)).sum(-1), "It has no axes"),
        (lambda i, j: torch.unsqueeze(left[i] * 2, 0).sum(-1), "A row has one axis"),
        (lambda i, j: left[i].unsqueeze(0).sum(-1), "A row has one axis"),
        (lambda i, j: j.unsqueeze(-1), "a row of 1 numbers|the whole"),
    ],
)
def test_rows_that_are_no_short_rows(mod: Mod, text: str) -> None:
    def added(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + mod(i, j)

    with pytest.raises(errors.WarploomError, match=text):
        wl.attention(*tensors(), variant=wl.flex(added), layout="HND")


@pytest.mark.some(0)  # 35 CPU seconds, nearly all of them of torch's compiler
@pytest.mark.parametrize("compiler", ["inductor"])
def test_compiled_flex_attention_says_the_same(compiler: str) -> None:
    """What the rules were read from: torch's compiler, where it works on this machine."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        small = (u[i] - u2[j]) + (c[i] * c2[j]) * 2 + where(u[j] == -1, 1, 0)
        return score + ((s[i] * s2[j] + small) // 3 + ~u[j]).float() % 97.0 / 16.0

    try:
        compiled = torch.compile(flex_attention, backend=compiler)(*tensors(), score_mod=mod)
    except Exception as error:
        pytest.skip(f"torch cannot compile FlexAttention here: {type(error).__name__}")
    found, eager = of_warploom(wl.flex(mod)), flex_attention(*tensors(), score_mod=mod)
    np.testing.assert_allclose(found, eager.transpose(1, 2), atol=2e-5)
    if not torch.allclose(compiled, eager, atol=2e-5):  # with one thread 2.13 leaves rows at zero
        pytest.skip("torch's compiled FlexAttention is not its own eager one on this machine")
    np.testing.assert_allclose(found, compiled.transpose(1, 2), atol=2e-5)


NUMBERS_OF_THE_SCORE: dict[str, Mod] = {
    "least number": lambda score, b, h, i, j: where(i >= j, score, torch.finfo(score.dtype).min),
    "tensor": lambda score, b, h, i, j: where(
        i >= j, score, torch.tensor(-float("inf"), dtype=score.dtype, device=score.device)
    ),
    "full": lambda score, b, h, i, j: where(
        i >= j, score, torch.full((), -9.0, dtype=score.dtype, device=score.device)
    ),
    "filled": lambda score, b, h, i, j: score.masked_fill(i < j, -float("inf")),
    "filled by torch": lambda score, b, h, i, j: torch.masked_fill(score, i < j, -1e4),
    "new full": lambda score, b, h, i, j: where(i >= j, score, score.new_full((), -7.0)),
    "zeros like": lambda score, b, h, i, j: where(i >= j, score, torch.zeros_like(score)),
    "ones like": lambda score, b, h, i, j: score + torch.ones_like(score) * i * 0.1,
    "full like": lambda score, b, h, i, j: torch.maximum(score, torch.full_like(score, -0.1)),
    "to its type": lambda score, b, h, i, j: score + ((i - j) * 0.1).to(score.dtype),
    "mask times score": lambda score, b, h, i, j: (i >= j) * score + (i == j).to(score.dtype),
    "by its type": lambda score, b, h, i, j: (
        score * 2 if score.dtype == torch.float32 and score.is_floating_point() else score
    ),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", NUMBERS_OF_THE_SCORE)
def test_numbers_of_the_type_of_the_score(name: str) -> None:
    mod = NUMBERS_OF_THE_SCORE[name]
    expected, variant = of_torch(mod), wl.flex(mod)
    np.testing.assert_allclose(of_warploom(variant), expected, atol=2e-5)
    np.testing.assert_allclose(of_oracle(variant), expected, atol=2e-5)


def test_mask_mods_may_begin_with_new_truths() -> None:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = b.new_ones((), dtype=torch.bool, device=b.device)
        return seen & (torch.ones_like(i, dtype=torch.bool) * (i >= j))

    np.testing.assert_allclose(
        of_warploom(wl.flex(None, mask)), of_warploom(wl.flex(None, lambda b, h, i, j: i >= j))
    )


# --- types that kernels do not compute in

clock = 1.7e9 + torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
slopes = 2.0 ** -torch.arange(1, 3, dtype=torch.float64) * 0.3
instant = torch.tensor(1.7e9, dtype=torch.float64)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, i, j: score + slopes[h],
        lambda score, b, h, i, j: score - slopes[h] * (i - j),
        lambda score, b, h, i, j: score * slopes[h] / slopes[1] + slopes[h] * 2,
        lambda score, b, h, i, j: where(i > j, score, -slopes[h]).clamp(max=1.0),
        lambda score, b, h, i, j: where(torch.tanh(score * slopes[h]) > 0.0, score, -score),
    ],
)
def test_float64_may_be_bias_and_factor_of_the_score(mod: Mod) -> None:
    np.testing.assert_allclose(of_warploom(wl.flex(mod)), of_torch(mod), atol=2e-5)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, i, j: score + (clock[i] - clock[j]),
        lambda score, b, h, i, j: score - 0.1 * (clock[i] - 1.7e9),
        lambda score, b, h, i, j: where(clock[i] > clock[j], score, 0.0),
        lambda score, b, h, i, j: where(clock[i] > instant, score, 0.0),
        lambda score, b, h, i, j: where(instant > 1.7e9, score, 0.0),
        lambda score, b, h, i, j: score + torch.sin(clock[i]),
        lambda score, b, h, i, j: score + (clock[i] * 2).int() % 7,
        lambda score, b, h, i, j: score + clock[i] // 10,
        lambda score, b, h, i, j: score + clock[i] % 10,
    ],
)
def test_float64_is_refused_where_rounding_would_tell(mod: Mod) -> None:
    with pytest.raises(errors.CannotTrace, match=r"a float64 tensor.*subtract an origin") as caught:
        wl.flex(mod)
    assert caught.value.source is not None and caught.value.source.file == __file__


def test_masks_of_timestamps_are_refused() -> None:
    with pytest.raises(errors.CannotTrace, match=r"le of numbers of 'clock', a float64 tensor"):
        wl.flex(None, lambda b, h, i, j: clock[j] <= clock[i])
    seconds = (clock - clock[0]).float()
    wl.flex(None, lambda b, h, i, j: seconds[j] <= seconds[i])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint64])
def test_types_that_float32_and_int32_cannot_stand_for_are_refused(dtype: torch.dtype) -> None:
    odd = torch.zeros(ROWS, dtype=dtype)
    with pytest.raises(errors.CannotTrace, match=f"captured tensor 'odd' of {dtype}"):
        wl.flex(lambda score, b, h, i, j: where(odd[i] == odd[j], score, 0.0))


def test_unsigned_and_long_values_beyond_int32_are_refused() -> None:
    for large in (torch.tensor([2**32 - 1] * ROWS, dtype=torch.uint32), torch.full((ROWS,), 2**40)):
        with pytest.raises(errors.ArgumentError, match="does not fit into int32"):
            of_warploom(wl.flex(scored(lambda i, j, large=large: large[i])))


def test_long_tensors_on_a_device_are_looked_at_once_for_each_write(monkeypatch: Any) -> None:
    looked: list[str] = []
    look = values._refuse_large

    def counted(field: TensorField, tensor: torch.Tensor, widest: torch.dtype) -> None:
        looked.append(field.name)
        look(field, tensor, widest)

    monkeypatch.setattr(values, "_refuse_large", counted)
    field = TensorField("ids", dtype_named("int64"), (None,))
    ids = torch.arange(4)
    for _ in range(3):
        values.refuse_large_on_device(field, ids, ids.detach())
    assert looked == ["ids"]
    ids[2] = 2**31
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match=r"its value 2147483648 at \[2\]"):
            values.refuse_large_on_device(field, ids, ids.detach())
    values.refuse_large_on_device(field, ids.int(), ids.int())  # nothing to look at
    assert len(looked) == 3
