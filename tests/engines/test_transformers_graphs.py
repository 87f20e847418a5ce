"""Decodes that a device plans, and the CUDA graphs that hold them, as far as a CPU can show it.

A stand-in for graphs replays a step by calling once more what was captured, with the tensors that
were captured: transformers has written other lengths and tables to them since.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from support.continuous_batches import batches
from support.tiny_models import prompts, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

import warploom as wl
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines import transformers as continuous
from warploom.engines.transformers import continuous as attention
from warploom.engines.transformers.decoding import Decodes, bounds_of

BATCHING = "transformers.generation.continuous_batching"


def answers(model: Any, given: list[list[int]], name: str, **options: Any) -> list[list[int]]:
    if "warploom" in name:
        continuous.register(name)
    return batches(model, given, name, use_async_batching=False, **options)


class Graphs:
    """What was captured, and whether a stream "is being captured" now."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.captured: list[int] = []  # requests of each graph
        self.planned: list[int] = []  # plans within each
        self.replays = 0

    def capture(self, runner: Any, forward: Any, stream: Any, *args: Any) -> None:
        """In the place of `_capture_graph`: a step runs, and is then recorded."""
        forward(*args)
        graph = Graph(self, forward, args)
        before = wl.stats().plans
        graph.run()
        self.planned.append(wl.stats().plans - before)
        self.captured.append(args[1]["cu_seq_lens_q"].numel() - 1)
        runner.inputs_and_outputs.set_graph(graph)


class Graph:
    def __init__(self, graphs: Graphs, forward: Any, args: tuple[Any, ...]) -> None:
        self._graphs, self._forward, self._args = graphs, forward, args

    def run(self, **changes: Any) -> None:
        model, data, *others = self._args
        self._graphs.is_capturing = True
        try:
            self._forward(model, {**data, **changes}, *others)
        finally:
            self._graphs.is_capturing = False

    def replay(self) -> None:
        """With a list of its own, since Python remembers nothing of the capture in a replay."""
        self._graphs.replays += 1
        self.run(read_index=list(self._args[1]["read_index"]))

    def reset(self) -> None:
        """Called by transformers."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """A CPU that transformers takes for a device with graphs, and warploom for one that plans."""
    made = Graphs()
    found: Any = [
        import_module(f"{BATCHING}.{name}") for name in ("initialization", "model_runner")
    ]
    initialization, runner = found
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda *_, **__: True)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(runner, "stream_context", lambda *_: nullcontext())
    monkeypatch.setattr(
        runner.ModelRunner, "_capture_graph",
        lambda self, *args: made.capture(self, *args),
    )  # fmt: skip
    monkeypatch.setattr(attention, "plans_on", lambda device: True)
    monkeypatch.setattr(attention, "_is_captured", lambda query: made.is_capturing)
    return made


def test_replays_answer_as_sdpa(graphs: Graphs) -> None:
    """Six requests that end at different steps: graphs of 1 to 8, the last one with idle rows."""
    given = prompts((5, 40, 1, 90, 33, 60), 48)
    expected = answers(tiny("Llama"), given, "sdpa")
    found = answers(
        tiny("Llama"), given, continuous.NAME_BY_TABLES,
        use_cuda_graph=(False, True), max_requests_per_batch=8,
    )  # fmt: skip
    assert found == expected
    assert 8 in graphs.captured
    assert set(graphs.captured) <= {1, 2, 4, 8}
    assert graphs.replays > 5
    assert set(graphs.planned) == {1}  # for both layers, within what is captured


def test_layers_with_windows_decode_without_graphs(graphs: Graphs) -> None:
    """transformers offers them no tables, and fills their lists up as if there were graphs."""
    given = prompts((5, 40, 1, 90, 33, 60))
    expected = answers(tiny("Gemma3"), given, "sdpa")
    found = answers(tiny("Gemma3"), given, continuous.NAME_BY_TABLES, use_cuda_graph=(False, True))
    assert found == expected
    assert not graphs.captured


def test_steps_without_graphs_answer_as_sdpa(graphs: Graphs) -> None:
    """The device plans them, too, for any number of requests."""
    given = prompts((5, 40, 1, 90, 33, 60), 48)
    expected = answers(tiny("Llama"), given, "sdpa")
    name = continuous.NAME_BY_TABLES
    assert answers(tiny("Llama"), given, name, use_cuda_graph=False) == expected
    assert not graphs.captured


def test_graphs_of_prompts_are_refused(graphs: Graphs) -> None:
    """By the attention of their first layer, with the option that serves decodes."""
    graphs.is_capturing = True
    call = attention._Call(torch.zeros(3, 4, 32), 1.0, None, None, None)
    cache = cast(Any, type("Cache", (), {"layer_to_allocator": [None]}))
    steps = {"read_index": [], "block_table": None}
    with pytest.raises(UnsupportedByEngine, match=r"use_cuda_graph=\(False, True\)"):
        attention._Attending().attend(0, call, torch.zeros(0), torch.zeros(0), cache, steps)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 23), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3)
)
def test_lists_and_places_of_decodes(lens: list[int], idle: int, extra: int) -> None:
    """Requests that only fill the batch have rows of -1, list no page, and change no cache."""
    page, width, total = 4, -(-max(lens) // 4) + extra, len(lens) + idle
    table = torch.randperm(len(lens) * width).int().view(-1, width)
    filled = torch.cat((table, torch.full((idle, width), -1, dtype=torch.int32)))
    kv = torch.from_numpy(np.cumsum([0, *lens, *[0] * idle]).astype(np.int32))
    made = Decodes.of(kv, filled, page)
    rows = [row[: -(-n // page)] for row, n in zip(table.tolist(), lens, strict=True)]
    listed = made.lists.kv_indices.tolist()
    found = [listed[a:b] for a, b in pairwise(made.lists.kv_indptr.tolist())]
    assert found == rows + [[]] * idle
    assert made.lists.qo_indptr.tolist() == list(range(total + 1))
    assert made.lists.last_page_len[: len(lens)].tolist() == [(n - 1) % page + 1 for n in lens]
    cache, new = torch.zeros(table.numel(), page, 2, 3), torch.randn(total, 2, 3)
    expected = cache.clone()
    for row, n, token in zip(rows, lens, new, strict=False):
        expected[row[-1], (n - 1) % page] = token
    made.write(cache, new)
    assert torch.equal(cache, expected)
    most = bounds_of(filled, page)
    assert total <= most.max_requests < 2 * total
    assert most.max_blocks >= len(listed)


def test_nothing_is_read_by_the_host() -> None:
    """Tensors without values: whatever asks for one raises."""
    with FakeTensorMode():
        kv = torch.zeros(9, dtype=torch.int32)
        made = Decodes.of(kv, torch.zeros(8, 5, dtype=torch.int32), 16)
        made.write(torch.zeros(40, 16, 2, 32), torch.zeros(8, 2, 32))
        assert made.lists.kv_indices.shape == (41,)
        with pytest.raises(Exception, match="tensor subclasses"):
            attention._on_host(kv)  # as plans of the host do
