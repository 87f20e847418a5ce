"""Tile classes hold for functions that are as far from exact as `FAST_ERROR` lets them be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warploom.dsl.masks.intervals import FIXED, FULL, SKIP, TileAnalysis
from warploom.dsl.types.accuracy import FAST_ERROR
from warploom.dsl.values import functions
from warploom.dsl.values.position import Position
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant

STEP = 0.001
DISTANCE = np.arange(1, 2000)
FAST = sorted(name for name, error in FAST_ERROR.items() if error.relative)


class Below(Variant):
    """Keys at which a function of the distance, up to 2, is below a limit."""

    def __init__(self, function: str, limit: float) -> None:
        super().__init__()
        self.function, self.limit = function, limit

    def logits_mask(self, at: Position) -> Any:
        return getattr(functions, self.function)((at.q_pos - at.kv_pos) * STEP) < self.limit


def classes_by_distance(variant: Variant) -> Any:
    """Class of the tile of one query and of one key, at each distance."""
    zeros, ones, last = (np.full(len(DISTANCE), n) for n in (0, 1, DISTANCE[-1]))
    fixed = {**dict.fromkeys(FIXED, ones), "batch": zeros, "kv_head": zeros, "kv_len": last + 1}
    boxes = {
        "q_pos": (last, last + 1),
        "kv_pos": (last - DISTANCE, last - DISTANCE + 1),
        "q_head": (zeros, ones),
    }
    return TileAnalysis(trace(variant), {}).classify(**fixed, **boxes)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.9995])
def test_classes_allow_for_fast_functions(name: str, share: float) -> None:
    exact = getattr(functions, name)(DISTANCE * STEP)
    relative, absolute = FAST_ERROR[name]
    slack = relative * np.abs(exact) + absolute
    limit = float(exact[int(share * len(exact))])
    classes = classes_by_distance(Below(name, limit))
    assert not np.any((classes == FULL) & (exact + slack >= limit))
    assert not np.any((classes == SKIP) & (exact - slack < limit))
    assert {FULL, SKIP} <= set(classes.tolist()) or share > 0.99
