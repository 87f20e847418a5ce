"""Functors must be pure: what they change, and what differs between two traces, is found."""

from __future__ import annotations

import random

import pytest

import warploom as wl
from warploom.dsl.variants.trace import trace
from warploom.errors import GlobalMutated, ImpureFunctor

CALLS = 0
SEEN: list[object] = []
TABLE = {"calls": 0}


def test_a_changed_global_is_found(placed, source) -> None:
    class Counts(wl.Variant):
        def logits_transform(self, logits, at):
            global CALLS
            CALLS += 1
            return logits

    with pytest.raises(GlobalMutated, match="logits_transform of Counts changed 'CALLS'") as caught:
        trace(Counts())
    assert "CALLS += 1" in source(caught.value).text


def _remember(value):
    SEEN.append(value)
    return value


def test_a_global_changed_by_a_helper_is_found(source) -> None:
    class Remembers(wl.Variant):
        def logits_mask(self, at):
            return _remember(at.kv_pos <= at.q_pos)

    with pytest.raises(GlobalMutated, match="logits_mask of Remembers changed 'SEEN'") as caught:
        trace(Remembers())
    assert "SEEN.append(value)" in source(caught.value).text


def test_a_changed_dict_or_closure_is_found(source) -> None:
    class Counts(wl.Variant):
        def logits_mask(self, at):
            TABLE["calls"] += 1
            return True

    with pytest.raises(GlobalMutated, match="'TABLE'"):
        trace(Counts())

    count = 0

    class Closure(wl.Variant):
        def logits_mask(self, at):
            nonlocal count
            count += 1
            return True

    with pytest.raises(GlobalMutated, match="'count'") as caught:
        trace(Closure())
    assert "count += 1" in source(caught.value).text


def test_changing_self_is_refused_at_the_line(placed) -> None:
    class Keeps(wl.Variant):
        cap = wl.Scalar("float32", default=1.0)

        def query_transform(self, q, at):
            self.last = q
            return q

    with pytest.raises(
        GlobalMutated, match=r"query_transform of Keeps changed 'self\.last'"
    ) as caught:
        trace(Keeps())
    assert placed(caught.value, "self.last")

    class Sets(Keeps):
        def query_transform(self, q, at):
            self.cap = 3.0
            return q

    with pytest.raises(GlobalMutated, match=r"self\.cap"):
        trace(Sets())

    class Appends(wl.Variant):
        def __init__(self):
            self.log = []

        def logits_mask(self, at):
            self.log.append(1)
            return True

    with pytest.raises(GlobalMutated, match=r"'self\.log'"):
        trace(Appends())


def test_an_impure_functor_is_found(placed) -> None:
    class Random(wl.Variant):
        def logits_transform(self, logits, at):
            return logits + random.random()

    with pytest.raises(ImpureFunctor, match="logits_transform of Random") as caught:
        trace(Random())
    assert placed(caught.value, "def logits_transform")
