"""What code reaches by names of modules, at run time, or as attributes of functions."""

from __future__ import annotations

import contextvars
import enum
import gc
import os
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.variants.fingerprint import fingerprint
from warploom.dsl.variants.identity import number_of

WIDTH = contextvars.ContextVar("WIDTH", default=100)
G = 100


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with a module `settings`, in which W is the width of a window."""
    made, settings = ModuleType("userpkg"), ModuleType("userpkg.settings")
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
def test_a_change_is_seen(package: Any, kind: type[wl.Variant]) -> None:
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


def test_members_that_no_code_names_do_not_matter(package: Any) -> None:
    key, _ = fingerprint(OfSubmodule())
    package.settings.other = [1]
    assert fingerprint(OfSubmodule())[0] == key


def test_relative_imports_have_no_key(package: Any) -> None:
    code = "def logits_mask(self, at):\n    from .settings import W\n"
    exec(f"{code}    return at.kv_pos + W > at.q_pos", namespace := {"__package__": "userpkg"})
    kind = type("Relative", (wl.Variant,), {"logits_mask": namespace["logits_mask"]})
    assert fingerprint(kind()) == (None, [])


def biased(bias: Any) -> wl.Variant:
    return wl.flex(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])


def test_what_the_environment_says_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfEnvironment(wl.Variant):
        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits * float(os.environ["FACTOR"])

    monkeypatch.setenv("FACTOR", "1.0")
    key, _ = fingerprint(OfEnvironment())
    monkeypatch.setenv("FACTOR", "3.0")
    assert key is not None and fingerprint(OfEnvironment())[0] != key


class Level(enum.IntEnum):
    LOW = 1

    @property
    def factor(self) -> float:
        return FACTOR[0]


class Pair(NamedTuple):
    width: int = 2

    @property
    def factor(self) -> float:
        return FACTOR[0]


class Named(dict[str, float]):
    factor = 1.0


FACTOR = [1.0]


@pytest.mark.parametrize("held", [Level.LOW, Pair(), Named(a=1.0)])
def test_classes_of_what_is_data_are_looked_at(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(wl.Variant):
        def __init__(self) -> None:
            self.held = held

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits * self.held.factor

    key, _ = fingerprint(Reads())
    assert key is not None and fingerprint(Reads())[0] == key
    monkeypatch.setitem(globals(), "FACTOR", [3.0])
    monkeypatch.setattr(Named, "factor", 3.0)
    assert fingerprint(Reads())[0] != key


def test_globals_that_only_attributes_share_a_name_with_do_not_matter() -> None:
    class OfBatch(wl.Variant):
        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits + at.FACTOR if hasattr(at, "FACTOR") else logits

    key, _ = fingerprint(OfBatch())
    FACTOR.append(2.0)
    try:
        assert key is not None and fingerprint(OfBatch())[0] == key
    finally:
        FACTOR.pop()


def test_values_of_captured_tensors_are_no_part_of_a_trace() -> None:
    """Lengths and offsets of a step are written in place, and nothing is traced for it."""
    offset = torch.tensor(3)
    variant = wl.flex(mask_mod=lambda b, h, q, k: k <= q + offset)
    q, k, v = torch.randn(3, 1, 30, 2, 16)
    wl.attention(q, k, v, variant=variant)
    before = wl.stats().traces
    for _ in range(3):
        offset.add_(1)
        found = wl.attention(q, k, v, variant=variant)
        torch.testing.assert_close(
            found, wl.attention(q, k, v, variant=variant, backend="reference").float()
        )
    assert wl.stats().traces == before


def test_a_captured_tensor_that_is_read_by_value_is_compared() -> None:
    with torch.inference_mode():  # in which nobody counts writes
        table = torch.ones(20000)
        held = SimpleNamespace(table=table)
        variant = wl.flex(lambda s, b, h, q, k: s * float(held.table[0]) + table[k])
        q, k, v = torch.randn(3, 1, 30, 2, 16)
        wl.attention(q, k, v, variant=variant)
        table[0] = 3.0
        found = wl.attention(q, k, v, variant=variant)
        expected = wl.attention(q, k, v, variant=variant, backend="reference")
    torch.testing.assert_close(found, expected.float())


def test_rebound_tensors_are_read_by_their_own_names() -> None:
    table = torch.zeros(30)

    def make() -> wl.Variant:
        return wl.flex(lambda s, b, h, q, k: s + table[k])

    q, k, v = torch.randn(3, 1, 30, 2, 16)
    first, second = make(), make()
    wl.attention(q, k, v, variant=first)
    table = torch.randn(30)
    for variant in (first, second, make(), first):
        found = wl.attention(q, k, v, variant=variant)
        expected = wl.attention(q, k, v, variant=variant, backend="reference")
        torch.testing.assert_close(found, expected.float())


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


def test_a_dictionary_that_answers_for_attributes_is_captured() -> None:
    class Dotted(dict[str, float]):
        __getattr__ = dict.__getitem__

    held = Dotted(factor=2.0)
    q, k, v = torch.randn(3, 1, 30, 2, 16)
    variant = wl.flex(lambda score, b, h, q, k: score * held.factor)
    found = wl.attention(q, k, v, variant=variant)
    torch.testing.assert_close(found, wl.attention(q, k, v, sm_scale=2.0 / 16**0.5))
