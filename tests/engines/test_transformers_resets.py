"""A run of continuous batching begins when its inputs are empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from warploom.engines import transformers as continuous
from warploom.engines.transformers.resets import waiting


@pytest.mark.parametrize(
    ("full", "device", "expected"),
    [
        (True, "cuda:0", ["emptied", "waited for cuda:0"]),
        (False, "cuda:0", ["emptied a part"]),  # each step: of the host's tensors
        (True, "cpu", ["emptied"]),
    ],
)
def test_the_host_waits_for_full_resets_of_a_gpu(
    full: bool, device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def stream(of: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: seen.append(f"waited for {of}"))

    def reset(ios: Any, full_reset: bool = False) -> None:
        seen.append("emptied" if full_reset else "emptied a part")

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    waiting(reset)(SimpleNamespace(device=torch.device(device)), full_reset=full)
    assert seen == expected


def test_registering_again_waits_once() -> None:
    ios: Any = ContinuousBatchingIOs
    continuous.register()
    once = ios._reset_static_tensors
    assert once.__module__ == waiting.__module__
    continuous.register(continuous.NAME_BY_TABLES)
    assert ios._reset_static_tensors is once
