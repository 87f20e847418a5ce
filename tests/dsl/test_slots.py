"""Slots of rolling caches, of positions in every type of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError

NARROW = ["uint8", "int8", "int16", "uint16", "int32", "int64"]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("ring", [wl.Rolling(300, 2), wl.Rolling(40_000, 2), wl.Rolling(7)])
def test_narrow_positions_do_not_wrap(ring: wl.Rolling, name: str) -> None:
    most = min(np.iinfo(name).max, 100_000)
    positions = np.unique(np.linspace(0, most, 60).astype(name))
    expected = [ring.slot_of(int(position)) for position in positions]
    assert all(0 <= slot < ring.slots for slot in expected)
    assert ring.slot_of(positions).tolist() == expected
    assert (
        ring.slot_of(torch.from_numpy(positions.astype("int64")).to(getattr(torch, name))).tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (-1, "holds -1; sequences begin at 0"),
        (np.array([3, -2]), "holds -2"),
        (1.5, "is 1.5; expected an int"),
        (True, "is True"),
        ([1, 2], "expected an int, or integers of NumPy or torch"),
        (torch.ones(2), "expected an int, or integers"),
        (np.ones(2, bool), "expected an int, or integers"),
    ],
)
def test_what_is_no_position_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        wl.Rolling(300, 2).slot_of(given)


def test_shapes_stay() -> None:
    ring = wl.Rolling(4, 1)
    assert ring.slot_of(torch.arange(12).view(3, 4)).tolist() == [
        [0, 1, 2, 3],
        [4, 1, 2, 3],
        [4, 1, 2, 3],
    ]
    assert ring.slot_of(np.zeros((0, 2), np.int32)).shape == (0, 2)
    assert ring.slot_of(np.int64(9)) == ring.slot_of(9)
