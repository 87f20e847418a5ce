"""What a `Scalar`'s check refuses is refused wherever a number is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.errors import ArgumentError, WrongDeclaration

SHAPE: dict[str, Any] = {
    "num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu",
}  # fmt: skip
Q = torch.randn(8, 2, 32)
DENSE = Q[None]


def share(number: float) -> str | None:
    return None if 0 <= number <= 1 else f"is {number}; expected a share from 0 to 1"


class Faded(wl.Variant):
    """A variant of a user's own."""

    share = wl.Scalar("float32", default=0.5, check=share)

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits * self.share


VALUES = pytest.mark.parametrize(
    ("variant", "name", "right", "wrong"),
    [
        (wl.SoftCap(9.0), "cap", 3, (0, -1.0, math.nan, math.inf)),
        (wl.SlidingWindow(4), "left", -1, (-2,)),
        (wl.SlidingWindow(4), "right", 0, (-2,)),
        (wl.SlidingWindow(4, sinks=0), "sinks", 2, (-1,)),
        (wl.Rope(), "rope_theta", 500.0, (0, -1.0, math.nan)),
        (wl.Rope(scaling=wl.LinearScaling(2.0)), "rope_factor", 4.0, (0.0,)),
        (wl.QKNorm(torch.ones(32), torch.ones(32)), "norm_eps", 0, (-1e-6, math.inf)),
        (wl.KVScale(1.0, 1.0), "v_scale", 2.0, (0.0, math.nan)),
        (Faded(), "share", 1, (1.5, torch.tensor(-0.5))),
    ],
)


@VALUES
def test_by_plan_run_and_attention(variant: Any, name: str, right: Any, wrong: Any) -> None:
    attention = wl.AttentionWrapper(variant, **SHAPE, backend="reference")
    lens, refused = ([0, 8], [0, 8]), pytest.raises(ArgumentError, match=f"^{name}: ")
    for value in wrong:
        with refused:
            attention.plan(*lens, **{name: value})
        with refused:
            wl.attention(DENSE, DENSE, DENSE, variant=variant, backend="reference", **{name: value})
        with refused:
            reference_attention(variant, *[Q.numpy()] * 3, inputs={name: value})
    attention.plan(*lens, **{name: right})
    for value in wrong:
        with refused:
            attention.run(Q, (Q, Q), **{name: value})
    attention.run(Q, (Q, Q), **{name: right})


@VALUES
def test_when_set_on_the_variant(variant: Any, name: str, right: Any, wrong: Any) -> None:
    before = variant.inputs()
    try:
        for value in wrong:
            with pytest.raises(ArgumentError, match=f"^{name}: "):
                setattr(variant, name, value)
        assert variant.inputs() == before
        setattr(variant, name, right)
        assert variant.inputs()[name] == right
    finally:
        for field, value in before.items():
            setattr(variant, field, value)


def test_by_kernels_of_the_device() -> None:
    attention = wl.AttentionWrapper(wl.SoftCap(9.0), **SHAPE)
    attention.plan([0, 8], [0, 8])
    out = attention.run(Q, (Q, Q), cap=3.0)
    with pytest.raises(ArgumentError, match=r"cap: 0\.0 is not above 0 and finite; leave SoftCap"):
        attention.run(Q, (Q, Q), cap=0.0)
    torch.testing.assert_close(attention.run(Q, (Q, Q), cap=3.0), out)


def test_a_declaration_is_checked_itself() -> None:
    with pytest.raises(ArgumentError, match=r"default: is 2\.0; expected a share"):
        wl.Scalar("float32", default=2, check=share)
    with pytest.raises(WrongDeclaration, match=r"'check' of wl\.Scalar: 3 is no function"):
        wl.Scalar("float32", check=3)  # type: ignore[arg-type]  # pyright: ignore


def test_a_check_that_answers_with_a_bool_is_told_what_is_expected() -> None:
    with pytest.raises(ArgumentError, match="its check returned True; expected None, or a text"):
        wl.Scalar("int32", default=4, check=lambda n: n > 0)  # type: ignore  # pyright: ignore


def test_variants_of_one_structure_keep_checks_of_their_own() -> None:
    """Their graphs are equal, so that a wrapper of one would else serve the other."""

    def made(limit: float) -> wl.Variant:
        class Limited(wl.Variant):
            gain = wl.Scalar("float32", check=lambda x: f"is {x}" if x > limit else None)

            def logits_transform(self, logits: Any, at: wl.Position) -> Any:
                return logits * self.gain

        return Limited()

    few, many = made(1.0), made(9.0)
    out = wl.attention(DENSE, DENSE, DENSE, variant=few, gain=1.0)
    assert wl.attention(DENSE, DENSE, DENSE, variant=many, gain=5.0).shape == out.shape
    with pytest.raises(ArgumentError, match="gain: is 5"):
        wl.attention(DENSE, DENSE, DENSE, variant=few, gain=5.0)


class Ignoring(wl.Variant):
    """Logits that no functor before it matters to."""

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return wl.to_float(at.kv_pos)


@pytest.mark.parametrize("k", [0.5, None], ids=["bound", "not"])
def test_a_scalar_that_nothing_reads_is_not_refused_by_the_reference(k: float | None) -> None:
    q = torch.zeros(1, 3, 1, 8)
    out = wl.attention(q, q, q, variant=wl.KVScale(k, 0.25) & Ignoring(), backend="reference")
    assert not out.any()
