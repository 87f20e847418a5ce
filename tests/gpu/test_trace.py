"""Traces on a GPU: items lie within what CUDA's events measure, and replays are traced, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ForbiddenUnderCapture, NotReplayed
from warploom.runtime.devices.device import cuda_facts

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
PAGE, PAGES = 16, 4096


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WARPLOOM_TRACE", "1")
    yield


def lists(kv_lens: tuple[int, ...], q_lens: tuple[int, ...], device: Any) -> list[torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len."""
    lens = np.array(kv_lens)
    pages = -(-lens // PAGE)
    parts = (
        np.append(0, np.cumsum(q_lens)),
        np.append(0, np.cumsum(pages)),
        np.arange(PAGES),  # more than are listed
        (lens - 1) % PAGE + 1,
    )
    return [torch.tensor(part, dtype=torch.int32, device=device) for part in parts]


@pytest.mark.parametrize("mixed", [False, True], ids=["one tile", "two roles if there are"])
def test_items_lie_within_the_time_between_two_events(
    cuda: torch.device, mixed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARPLOOM_MIXED_ROLES", str(int(mixed)))
    wrapper = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(PAGE), device=cuda, **SHAPE)
    q_lens, kv_lens = (500, *(1,) * 20), (2000, *range(100, 2100, 100))
    wrapper.plan(*lists(kv_lens, q_lens, "cpu"))
    q = torch.randn(sum(q_lens), 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    wrapper.run(q, cache)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    wrapper.run(q, cache)
    end.record()
    found = wl.trace(wrapper, tmp_path / "run.json")
    assert found.on_gpu and len(found.items) > 20
    assert 0 < found.span_us <= 1e3 * begin.elapsed_time(end) + 2  # the timer's own step
    assert set(found.busy()) <= set(range(cuda_facts(cuda.index).num_sms))
    assert (found.items["cycles"] > 0).all()
    assert wrapper.choice is not None
    names = list(wrapper.choice.tile.of_roles) or ["single"]
    assert [one.role for one in found.roles()] == names
    assert ("prices" in found.predicted.by) == bool(wrapper.choice.tile.of_roles)
    assert found.predicted.us > 0


def test_replays_are_traced_with_the_plan_that_they_made(cuda: torch.device) -> None:
    bounds = wl.Bounds(max_requests=4, max_q_rows=4, max_kv_len=8000, max_blocks=PAGES)
    wrapper = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), device=cuda, bounds=bounds, cuda_graph=True, **SHAPE
    )
    wrapper.warm_up()
    given = lists((900, 30), (1, 1), cuda)
    q = torch.randn(4, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    wrapper.plan(*given)
    wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.plan(*given)
        wrapper.run(q, cache)
        with pytest.raises(ForbiddenUnderCapture):
            wl.trace(wrapper)
    for kv_lens in ((900, 30), (31, 7000)):
        for mine, new in zip(given, lists(kv_lens, (1, 1), cuda), strict=True):
            mine.copy_(new)
        if kv_lens[0] == 31:  # nothing has planned these yet
            with pytest.raises(NotReplayed):
                wl.trace(wrapper)
        graph.replay()
        items = wl.trace(wrapper).items
        ends = [items["kv_end"][items["request"] == request].max() for request in (0, 1)]
        assert ends == list(kv_lens)
