"""The key of a variant changes with all that its functors may read, and with nothing else."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.variants.fingerprint import fingerprint

CONF = SimpleNamespace(inner=SimpleNamespace(w=1.0))
FACTOR = [2.0]


class Config:
    scale = 1.0

    def __init__(self, w: float) -> None:
        self.w = w


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w: float) -> None:
        self.w = w


def helper(x):
    return x * FACTOR[0] * CONF.inner.w


class Reads(wl.Variant):
    cap = wl.Scalar("float32", default=1.0)

    def __init__(self, cap: float = 1.0) -> None:
        self.cap = cap
        self.cfg = Config(3.0)
        self.layers = {"first": [Config(1.0)]}
        self.slotted = Slotted(1.0)
        self.table = np.ones(4)
        self.weight = torch.ones(4)
        self.half = torch.ones(4, dtype=torch.bfloat16)

    def logits_transform(self, logits, at):
        scale = self.cfg.w * self.cfg.scale * self.layers["first"][0].w * self.slotted.w
        return helper(logits) * scale * float(self.table[0]) * float(self.weight[0]) * self.cap


CHANGES = {
    "attribute": lambda v: setattr(v.cfg, "w", 5.0),
    "nested": lambda v: setattr(v.layers["first"][0], "w", 5.0),
    "slot": lambda v: setattr(v.slotted, "w", 5.0),
    "array": lambda v: v.table.__setitem__(0, 5.0),
    "tensor": lambda v: v.weight.mul_(5.0),
    "tensor seen by NumPy": lambda v: v.weight.numpy().__setitem__(0, 5.0),
    "global": lambda v: setattr(CONF.inner, "w", 5.0),
    "helper's global": lambda v: FACTOR.__setitem__(0, 5.0),
    "class of an attribute": lambda v: setattr(Config, "scale", 5.0),
}


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONF.inner, "w", 1.0)
    monkeypatch.setitem(globals(), "FACTOR", [2.0])
    monkeypatch.setattr(Config, "scale", 1.0)


@pytest.mark.some(4)
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    variant = Reads()
    before, _ = fingerprint(variant)
    assert before is not None and hash(before) is not None
    assert fingerprint(variant)[0] == before
    torch.manual_seed(0)  # logits are scaled by 30, and so is rounding: few draws exceed the bound
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    first = wl.attention(q, k, v, variant=variant)
    CHANGES[change](variant)
    assert fingerprint(variant)[0] != before
    after = wl.attention(q, k, v, variant=variant)
    assert not torch.allclose(first, after)
    expected = wl.attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(after, expected)


def test_equal_variants_have_equal_keys_whatever_their_fields_hold() -> None:
    key, alive = fingerprint(Reads())
    assert fingerprint(Reads(cap=3.0))[0] == key
    assert not any(isinstance(kept, (list, dict, torch.Tensor, wl.Variant)) for kept in alive)

    def make(factor):
        class Made(wl.Variant):
            def logits_transform(self, logits, at):
                return logits * factor

        return Made()

    made = make(2.0)
    assert fingerprint(made)[0] == fingerprint(type(made)())[0]
    assert fingerprint(make(0.0))[0] != fingerprint(make(-0.0))[0]


@pytest.mark.parametrize(
    "held", [collections.deque([1.0]), np.ones(1 << 15), list(range(5000)), np.array([1.0], object)]
)
def test_what_cannot_be_compared_has_no_key(held) -> None:
    variant = Reads()
    variant.held = [held]
    assert fingerprint(variant) == (None, [])


def test_without_a_key_a_variant_is_traced_at_every_call() -> None:
    class Big(wl.Variant):
        def __init__(self) -> None:
            self.table = np.ones(1 << 15)

        def logits_transform(self, logits, at):
            return logits * float(self.table[7])

    torch.manual_seed(0)  # logits are scaled by 30, and so is rounding: few draws exceed the bound
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    variant = Big()
    wl.attention(q, k, v, variant=variant)
    variant.table[7] = 5.0
    expected = wl.attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(wl.attention(q, k, v, variant=variant), expected)


def test_library_variants_and_flex_have_keys() -> None:
    bias = torch.zeros(4)
    biased = wl.flex(lambda s, b, h, q, k: s + bias[h])
    for variant in (wl.Causal() & wl.SoftCap(50.0), wl.Alibi(bias), biased, wl.Rope()):
        key, _ = fingerprint(variant)
        assert key is not None and fingerprint(variant)[0] == key


def test_what_has_every_attribute_is_no_array() -> None:
    class Endless:
        def __getattr__(self, name: str) -> object:
            if name == "device":
                raise AttributeError(name)
            return Endless()

    anything = Endless()

    def logits_transform(self, logits, at):
        return logits * (2.0 if anything.some else 1.0)

    kind = type("Asks", (wl.Variant,), {"logits_transform": logits_transform})
    fingerprint(kind())
