"""With WARPLOOM_TRACE=1 kernels tell when each work item ran; others have no word of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import compiled

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.codegen.stamps import STAMP

ENDS = [0, 70, 71, 71, 104], [0, 130, 387, 427, 460]  # of queries, and of keys
EMULATED = {
    "hopper": TileConfig(64, 64, 4, 2, "hopper", 2),
    "tall": TileConfig(64, 32, 4, 2),
    "streamed": TileConfig(16, 64, 2, 2),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WARPLOOM_TRACE", "1")
    yield


def stamps_of(wrapper: Any) -> np.ndarray[Any, Any]:
    """All records of a workspace, of the plan's items first."""
    found: np.ndarray[Any, Any] = (
        compiled(wrapper).planner._memory.workspace.stamps.numpy().view(STAMP)
    )
    return found


def planned(dtype: str = "bfloat16", tile: TileConfig | None = None) -> wl.AttentionWrapper:
    wrapper = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype=dtype, device="cpu", tile=tile,
    )  # fmt: skip
    wrapper.plan(*ENDS)
    return wrapper


def run(wrapper: wl.AttentionWrapper, dtype: str = "bfloat16") -> None:
    q, kv = (torch.randn(ends[-1], 4, 64).to(getattr(torch, dtype)) for ends in ENDS)
    wrapper.run(q, (kv[:, :2].contiguous(), kv[:, 2:].contiguous()))


def is_blank(stamps: np.ndarray[Any, Any]) -> bool:
    return not stamps.view(np.int64).any()


def check(wrapper: wl.AttentionWrapper) -> None:
    """Each item has run, and ended no earlier than it began; there is nothing behind them."""
    assert wrapper.planned is not None
    count, stamps = len(wrapper.planned.plan.items), stamps_of(wrapper)
    mine = stamps[:count]
    assert count > 3
    assert (mine["begin"] > 0).all() and (mine["end"] >= mine["begin"]).all()
    assert is_blank(stamps[count:])


@pytest.mark.usefixtures("traced")
def test_each_item_of_a_cpu_tells_its_time() -> None:
    wrapper = planned("float32")
    assert is_blank(stamps_of(wrapper))  # nothing has run yet
    run(wrapper, "float32")
    check(wrapper)
    before = stamps_of(wrapper)["begin"].copy()
    run(wrapper, "float32")
    assert (stamps_of(wrapper)["begin"] >= before).all()
    wrapper.plan(*ENDS)
    assert is_blank(stamps_of(wrapper))


@pytest.mark.some(2)
@pytest.mark.usefixtures("traced", "emulator")
@pytest.mark.parametrize("name", list(EMULATED))
def test_each_item_of_a_gpu_kernel_does(name: str) -> None:
    wrapper = planned(tile=EMULATED[name])
    run(wrapper)
    check(wrapper)


def test_other_kernels_have_no_word_of_it() -> None:
    wrapper = planned("float32")
    assert wrapper.planned is not None
    assert "StampRecord" not in wrapper.planned.kernel.source.text
    assert len(stamps_of(wrapper)) == 0
