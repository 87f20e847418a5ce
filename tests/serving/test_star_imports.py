"""`from warploom.prefetch import *` has all that the module offers, as its siblings' stars do."""

from __future__ import annotations

from typing import Any

import pytest

from warploom import prefetch, recommendation


@pytest.mark.parametrize("module", [prefetch, recommendation])
def test_all_names_are_imported_by_a_star(module: Any) -> None:
    assert module.__all__ == dir(module) and "_HOME" not in module.__all__
