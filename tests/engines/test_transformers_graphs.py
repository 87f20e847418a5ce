"""Steps that a device plans, and the CUDA graphs that hold them, as far as a CPU can show it.

A stand-in for graphs replays a step by calling once more what was captured, with the tensors that
were captured: transformers has written other lengths and tables to them since.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from itertools import accumulate, pairwise, product
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from support.continuous_batches import alone, batches
from support.tiny_models import prompts, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines import transformers as continuous
from warploom.engines.layers import AttentionLayer
from warploom.engines.transformers import wrappers
from warploom.engines.transformers.steps import Indptr, Step, bounds_by_rows, bounds_by_table
from warploom.runtime.formats.batch import OnDevice
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.planning.rules import Options, Rules
from warploom.runtime.planning.visibility import Heads
from warploom.scheduler.model.problem import Partition

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
        """In the place of `_capture_graph`: a step runs, and is then recorded without effect."""
        forward(*args)
        graph = Graph(self, forward, args)
        before = wl.stats().plans
        written = args[1]["cache"].cache_tensor, *args[2:]
        kept = [one.clone() for one in written]
        graph.run()
        for one, was in zip(written, kept, strict=True):
            one.copy_(was)
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
    monkeypatch.setattr(wrappers, "plans_on", lambda device: True)
    monkeypatch.setattr(wrappers, "is_capturing", lambda device: made.is_capturing)
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


@pytest.mark.parametrize("tables", [False, True], ids=["lists", "tables"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3"])
def test_by_default_graphs_hold_steps_with_prompts(graphs: Graphs, name: str, tables: bool) -> None:
    """Six prompts, two of which share a prefix with others: chunks, new requests, decodes."""
    given = prompts((5, 40, 1, 90, 33, 60), 0 if name == "Gemma2" else 48)
    expected = alone(tiny(name), given) if name == "Gemma2" else answers(tiny(name), given, "sdpa")
    found = answers(
        tiny(name), given, continuous.NAME_BY_TABLES if tables else continuous.NAME,
        q_padding_interval_size=16, kv_padding_interval_size=128, max_requests_per_batch=8,
    )  # fmt: skip
    assert found == expected
    assert {1, 4, 8} & set(graphs.captured) if tables else set(graphs.captured) == {8}
    assert graphs.replays > 5
    kinds = 2 if name in ("Gemma2", "Gemma3") else 1  # of layers, each planned within the graph
    assert set(graphs.planned) <= {1, kinds}


def test_graphs_of_what_the_host_plans_are_refused(graphs: Graphs) -> None:
    """By the attention of their first layer, with the option that goes without."""
    graphs.is_capturing = True
    layer = AttentionLayer("layers.0", 4, 2, 32, 1.0)
    call = wrappers.Call(torch.zeros(3, 4, 32), layer, None, None)
    allocator = SimpleNamespace(
        layer_type="full_attention", tokens_per_page=16,
        get_cache_for_block_table=lambda layer: (torch.zeros(9, 16, 2, 32),) * 2,
    )  # fmt: skip
    cache = SimpleNamespace(layer_to_allocator=[allocator])
    new = torch.zeros(0), torch.zeros(0)
    with pytest.raises(UnsupportedByEngine, match=r"use_cuda_graph=False"):
        wrappers.Attending().attend(0, call, new, cache, {"max_length_q": 2})


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
    made = Step.of_table(kv, filled, page)
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
    most = bounds_by_table(filled, page)
    assert total <= most.max_requests < 2 * total
    assert most.max_blocks >= len(listed)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 3), st.integers(0, 5), st.integers(1, 5),
)  # fmt: skip
def test_lists_and_places_of_any_rows(
    lens: list[tuple[int, int]], idle: int, extra: int, page: int
) -> None:
    """Old and new tokens of requests; idle ones and rows that nobody wants come behind."""
    owned = [-(-(old + new) // page) for old, new in lens]
    pages = iter((torch.randperm(sum(owned)) + 1).tolist())  # page 0 takes what nobody wants
    rows = [[next(pages) for _ in range(count)] for count in owned]
    places = [
        [row[at // page] * page + at % page for at in range(old + new)]
        for row, (old, new) in zip(rows, lens, strict=True)
    ]
    is_read = any(old for old, _ in lens)
    read = [place for one in places for place in one] + [0] * extra if is_read else []
    write = [place for one, (old, _) in zip(places, lens, strict=True) for place in one[old:]]
    qo, kv = (
        torch.tensor([0, *accumulate(counts), *[sum(counts)] * idle], dtype=torch.int32)
        for counts in ([new for _, new in lens], [old + new for old, new in lens])
    )
    indices = [torch.tensor(x, dtype=torch.int64) for x in (read, write + [0] * extra)]
    made = Step.of_places(Indptr(qo, kv), indices[0], indices[1], page)
    listed = made.lists.kv_indices.tolist()
    found = [listed[a:b] for a, b in pairwise(made.lists.kv_indptr.tolist())]
    assert found == rows + [[]] * (idle + 1)
    assert made.lists.qo_indptr.tolist() == [*qo.tolist(), len(write) + extra]
    assert made.lists.last_page_len[: len(lens)].tolist() == [
        (old + new - 1) % page + 1 for old, new in lens
    ]
    new = torch.randn(len(write) + extra, 2, 3)
    cache = torch.zeros(sum(owned) + 1, page, 2, 3)
    made.write(cache, new)
    assert torch.equal(cache.flatten(0, 1)[write], new[: len(write)])
    all_rows = len(write) + extra
    most = bounds_by_rows(len(lens) + idle, all_rows, len(read) + all_rows, 4, page)
    assert most.max_requests > len(lens) + idle
    assert most.max_q_rows >= all_rows
    assert most.max_blocks >= len(listed)


@pytest.mark.parametrize("arch", [ARCHS["sm_80"], ARCHS["sm_90a"]], ids=lambda arch: arch.name)
@pytest.mark.parametrize("stored", [wl.Ragged(), wl.Paged(16)], ids=["ragged", "paged"])
@pytest.mark.parametrize("group_size", [1, 4, 7, 32])
def test_bounds_leave_plans_to_the_device(group_size: int, stored: Any, arch: Arch) -> None:
    """Tiles are few for each request, whatever tile the bounds fix."""
    page = stored.block_kv if isinstance(stored, wl.Paged) else None
    for head_dim, requests, rows in product((64, 128), (1, 7, 64, 1024), (16, 64, 2048, 16384)):
        bounds = bounds_by_rows(min(requests, rows), rows, 1 << 20, group_size, page)
        spec = AttentionSpec(trace(wl.Causal()), head_dim, head_dim, dtype("bfloat16"), stored)
        options = Options(bounds, True, False, None, None, may_mix=True)
        kernels, heads = KernelChoice(spec, arch, num_sms=132), Heads(group_size, 1)
        rules = Rules(spec, kernels, heads, options, torch.device("meta"))
        assert rules.fixed is not None
        batch = OnDevice.of((None,) * 4, requests, rows, bounds)
        assert rules.partition(batch, rules.fixed.tile) in (Partition.LINES, Partition.ROLES)


@pytest.mark.parametrize("old", [0, 24])
def test_nothing_is_read_by_the_host(old: int) -> None:
    """Tensors without values: whatever asks for one raises."""
    with FakeTensorMode():
        kv = torch.zeros(9, dtype=torch.int32)
        cache, new = torch.zeros(40, 16, 2, 32), torch.zeros(8, 2, 32)
        decodes = Step.of_table(kv, torch.zeros(8, 5, dtype=torch.int32), 16)
        assert decodes.lists.kv_indices.shape == (41,)
        write = torch.zeros(8, dtype=torch.int64)
        read = torch.zeros(old, dtype=torch.int64)
        prompts = Step.of_places(Indptr(kv, kv), read, write, 16)
        assert prompts.lists.kv_indices.shape == (9 + old // 16,)
        for made in (decodes, prompts):
            made.write(cache, new)
        with pytest.raises(Exception, match="tensor subclasses"):
            kv.numpy()  # as plans of the host do
