"""Tests that need a GPU are skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cuda() -> Any:
    """The current CUDA device; seeds are set."""
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())
