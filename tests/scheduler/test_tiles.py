"""Keys between which query tiles are planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from warploom.scheduler.model.layout import SEGMENT
from warploom.scheduler.model.tiles import key_bounds

_places = st.integers(-70, 70)


@given(st.lists(st.tuples(_places, _places), min_size=1), st.integers(0, 64), st.integers(1, 32))
@example([(96, 96)], 96, 16)  # a window behind the last block
@example([(40, 40)], 96, 16)
def test_bounds_begin_at_a_key_tile_and_are_empty_where_nothing_is_seen(
    answers: list[tuple[int, int]], count: int, keys: int
) -> None:
    asked = np.array(answers, np.int64)
    mask: Any = SimpleNamespace(kv_bounds=lambda *_: (asked[:, 0], asked[:, 1]))
    segments = np.zeros(1, SEGMENT.dtype)
    segments["kv_count"] = count
    nothing = np.zeros(len(asked), np.int64)
    begin, end = key_bounds(mask, segments, (nothing, nothing, nothing), keys)
    for (low, high), *found in zip(answers, begin.tolist(), end.tolist(), strict=True):
        low, high = max(low, 0), min(high, count)
        assert found == ([low // keys * keys, high] if low < high else [0, 0])
