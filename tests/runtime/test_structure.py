"""Traces kept between calls, and the threads that share them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import pytest
from support.side_by_side import in_threads

from warploom.dsl.library.causal import Causal
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.variants.variant import Variant
from warploom.runtime.declaring import structure


class Slow(OrderedDict[Any, Any]):
    """Leaves the other thread time between finding an entry and using it."""

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        time.sleep(0.001)
        return found


def test_threads_may_drop_what_another_one_has_just_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_traced", Slow())
    monkeypatch.setattr(structure, "_LIMIT", 1)

    def work(variant: Variant) -> None:
        for _ in range(30):
            structure.traced_once(variant)

    in_threads(work, (Causal(), SoftCap(2.0)))
