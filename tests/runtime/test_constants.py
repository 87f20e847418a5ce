"""A captured number that keeps changing is warned of, since each value is a kernel of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.notices import ManyConstants
from warploom.runtime.declaring.structure import traced_once

GLOBAL = 0.0


def told_of(made: Callable[[int], Any], times: int) -> list[str]:
    """What is warned of while variants are traced, made of 0, 1, ..."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for value in range(times):
            traced_once(made(value))
    return [str(one.message) for one in found if one.category is ManyConstants]


def test_a_number_that_keeps_changing_is_told_once() -> None:
    def made(offset: int) -> wl.Variant:
        return wl.flex(None, lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx)

    assert told_of(made, 63) == []
    (told,) = told_of(made, 80)
    assert told.startswith("'offset', a Python number that '<lambda>' (line ")
    assert "offset = torch.tensor(3)" in told
    assert told_of(made, 90) == []


def test_globals_and_helpers_are_looked_at() -> None:
    def shifted(score: Any) -> Any:
        return score + GLOBAL

    def made(value: int) -> wl.Variant:
        globals()["GLOBAL"] = value / 2
        return wl.flex(lambda score, b, h, q_idx, kv_idx: shifted(score))

    (told,) = told_of(made, 65)
    assert told.startswith("'GLOBAL', a Python number that 'shifted'")


def test_what_makes_no_kernels_is_not_told() -> None:
    def of_tensors(value: int) -> wl.Variant:
        offset = torch.tensor(value)
        return wl.flex(None, lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx)

    def of_one_value(value: int) -> wl.Variant:
        offset, other = 3, str(value)
        return wl.flex(None, lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx + len(other[1:1]))

    assert told_of(of_tensors, 80) == []
    assert told_of(of_one_value, 80) == []
    assert told_of(lambda value: wl.SlidingWindow(value), 80) == []


def test_it_is_told_at_the_line_of_the_call() -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 8)
    slope = 0.0

    def sloped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slope * kv_idx

    with pytest.warns(ManyConstants, match="'slope'") as told:
        for number in range(64):
            slope = number / 2
            wl.attention(q, k, v, variant=wl.flex(sloped), layout="HND", backend="reference")
    assert [one.filename for one in told if one.category is ManyConstants] == [__file__]
