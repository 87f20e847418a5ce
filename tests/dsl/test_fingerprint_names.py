"""What code reaches by names of modules, at run time, or as attributes of functions."""

from __future__ import annotations

import contextvars
import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.variants.fingerprint import fingerprint
from warploom.dsl.variants.identity import number_of

WIDTH = contextvars.ContextVar("WIDTH", default=100)
G = 100


class Package(ModuleType):
    """With a module `settings`, in which W is the width of a window."""

    settings: Any


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made, settings = Package("userpkg"), ModuleType("userpkg.settings")
    made.settings, settings.W = settings, 100  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "userpkg", made)
    monkeypatch.setitem(sys.modules, "userpkg.settings", settings)
    monkeypatch.setitem(globals(), "userpkg", made)
    monkeypatch.setitem(globals(), "HOLDER", SimpleNamespace(inner=settings))
    monkeypatch.setitem(globals(), "G", 100)
    monkeypatch.setattr(helper, "W", 100, raising=False)
    return made


def helper(at: Any) -> Any:
    return at


class OfSubmodule(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + userpkg.settings.W > at.q_pos  # type: ignore[name-defined]  # noqa: F821


class ImportedFrom(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        from userpkg.settings import W  # type: ignore[import-not-found]  # pyright: ignore

        return at.kv_pos + W > at.q_pos


class ImportedWhole(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        import userpkg.settings  # pyright: ignore[reportMissingImports]

        return at.kv_pos + userpkg.settings.W > at.q_pos


class OfObject(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + HOLDER.inner.W > at.q_pos  # type: ignore[name-defined]  # noqa: F821


class OfFunction(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + helper.W > at.q_pos  # type: ignore[attr-defined]


class ByString(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + getattr(userpkg.settings, "w".upper()) > at.q_pos  # type: ignore[name-defined]  # noqa: F821


class OfGlobals(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + globals()["G"] > at.q_pos


class OfContext(wl.Variant):
    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos + WIDTH.get() > at.q_pos


KEYED = OfSubmodule, ImportedFrom, ImportedWhole, OfObject, OfFunction
UNKEYED = ByString, OfGlobals, OfContext


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", [*KEYED, *UNKEYED])
def test_a_change_is_seen(package: Package, kind: type[wl.Variant]) -> None:
    key, _ = fingerprint(kind())
    assert (key is not None) is (kind in KEYED)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 32, 2, 16)
    wide = wl.attention(q, k, v, variant=kind())
    package.settings.W = helper.W = 4  # type: ignore[attr-defined]
    globals()["G"] = 4
    token = WIDTH.set(4)
    try:
        narrow = wl.attention(q, k, v, variant=kind())
        expected = wl.attention(q, k, v, variant=kind(), backend="reference")
    finally:
        WIDTH.reset(token)
    assert not torch.allclose(wide, narrow)
    torch.testing.assert_close(narrow, expected)


def test_members_that_no_code_names_do_not_matter(package: Package) -> None:
    key, _ = fingerprint(OfSubmodule())
    package.settings.other = [1]
    assert fingerprint(OfSubmodule())[0] == key


def test_relative_imports_have_no_key(package: Package) -> None:
    code = "def logits_mask(self, at):\n    from .settings import W\n"
    exec(f"{code}    return at.kv_pos + W > at.q_pos", namespace := {"__package__": "userpkg"})
    kind = type("Relative", (wl.Variant,), {"logits_mask": namespace["logits_mask"]})
    assert fingerprint(kind()) == (None, [])


def biased(bias: Any) -> wl.Variant:
    return wl.flex(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])


def test_traces_keep_no_tensor_alive() -> None:
    q, k, v = torch.randn(3, 1, 256, 2, 16)

    def step() -> weakref.ref[torch.Tensor]:
        bias = torch.randn(2, 256, 256)  # too large to be compared
        wl.attention(q, k, v, variant=biased(bias))
        return weakref.ref(bias)

    step()  # the wrapper that all share keeps the variant that it was made of
    dead = [step() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in dead] == [None] * 3


@pytest.mark.parametrize("kind", ["float32", "float64", "NumPy", "inference"])
def test_large_captured_tensors_are_traced_once(kind: str) -> None:
    q, k, v = torch.randn(3, 1, 256, 2, 16)
    with torch.inference_mode(kind == "inference"):
        bias: Any = torch.randn(2, 256, 256, dtype=torch.float64 if kind == "float64" else None)
    variant = biased(bias.numpy() if kind == "NumPy" else bias)
    wl.attention(q, k, v, variant=variant)
    before = wl.stats().traces
    first = wl.attention(q, k, v, variant=variant)
    assert wl.stats().traces == before
    with torch.inference_mode(kind == "inference"):
        bias.mul_(2.0)  # its values are read anew
    assert not torch.allclose(wl.attention(q, k, v, variant=variant), first)


def test_numbers_are_not_given_twice() -> None:
    first = np.ones(1)
    number = number_of(first)
    assert number is not None and number_of(first) == number
    del first
    assert all(number_of(np.ones(1)) != number for _ in range(10))
    assert number_of([]) is None  # which has no weak references
