"""Tiny random models on disk, for engines that load them as they load others.

These tests need an engine in the environment: `make test-engines` makes one. Elsewhere the files
that need it are skipped, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# before vLLM is imported: engines in this process, small caches, no word about each step
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny model, once for equal arguments, and returns its folder."""
    from support.tiny_models import save

    folder, made = tmp_path_factory.mktemp("models"), {}

    def saving(name: str, **changes: object) -> Path:
        key = f"{name}-{sorted(changes.items())}"
        if key not in made:
            made[key] = save(folder / f"{name}{len(made)}", name, **changes)
        return made[key]

    return saving
