"""What is refused while a CUDA graph is being captured, with a device that only says it is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fake_stream import FakeStream
from support.holds import FakeHold
from support.parts import compiled

from warploom.codegen.source import TileConfig
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.types.formats import Paged
from warploom.errors import CompileForbidden, ForbiddenUnderCapture, IndexOutOfRange
from warploom.runtime.calls import attention as attention_module
from warploom.runtime.calls import attention_args
from warploom.runtime.calls.attention import attention
from warploom.runtime.devices import graph, graph_hold, streams, workspace
from warploom.runtime.wrappers import wrapper
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.plans.capacity import WorkspaceSize

SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 64, "dtype": "float32", "device": "cpu"}


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Set `on` to be under capture, and `stream` to the stream that is captured."""
    state: dict[str, int] = {"on": False, "stream": 1}

    def is_capturing(device: torch.device) -> bool:
        return bool(state["on"])

    for module in (graph, streams, workspace, attention_module):
        monkeypatch.setattr(module, "is_capturing", is_capturing)
    monkeypatch.setattr(attention_module, "raw_stream", lambda index: state["stream"])
    monkeypatch.setattr(attention_module, "_captured", graph_hold.KeptForGraphs())
    monkeypatch.setattr(graph_hold, "GraphHold", FakeHold)
    yield state
    state["on"] = False


def tensors(keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 1, keys, 2, 64, generator=torch.Generator().manual_seed(keys))
    return q[:, :1], k, v


def test_run_is_free_and_plan_is_refused(capture: dict[str, int]) -> None:
    attention = AttentionWrapper(Causal(), **SHAPE)
    attention.plan([0, 1], [0, 5])
    q, k, v = (x[0] for x in tensors(5))
    before = attention.run(q, (k, v))
    capture["on"] = True
    assert torch.equal(attention.run(q, (k, v)), before)
    with pytest.raises(ForbiddenUnderCapture, match=r"plan\(\) was called while a CUDA graph"):
        attention.plan([0, 1], [0, 5])


def test_a_kernel_that_is_not_loaded_is_not_compiled(capture: dict[str, int]) -> None:
    capture["on"] = True
    with pytest.raises(CompileForbidden, match="a CUDA graph is being captured"):
        AttentionWrapper(Causal(), tile=TileConfig(6, 64, 1, 1), **SHAPE)


def test_a_workspace_does_not_grow(capture: dict[str, int]) -> None:
    space = workspace.Workspace(torch.device("cpu"))
    small, large = WorkspaceSize(512, 0, 0, 256), WorkspaceSize(4096, 0, 0, 256)
    space.fit(large)
    capture["on"] = True
    space.fit(small)
    space.fit(large)
    with pytest.raises(ForbiddenUnderCapture, match="workspace cannot grow"):
        space.fit(WorkspaceSize(8192, 0, 0, 256))


def test_counters_that_only_a_graph_clears_are_cleared_by_the_next_plan(
    capture: dict[str, int],
) -> None:
    space = workspace.Workspace(torch.device("cpu"))
    small, large = WorkspaceSize(512, 0, 0, 256), WorkspaceSize(4096, 0, 0, 256)
    space.fit(large)
    counters = space.memory[small.offsets["arrivals"] : small.total]
    capture["on"] = True
    space.fit(small)
    for on in (True, False):  # another graph may be the first to be replayed
        capture["on"] = on
        counters.fill_(1)  # what a capture enqueues has not run
        space.fit(small)
        assert not counters.any()
    counters.fill_(1)
    space.fit(small)  # nothing is enqueued for a layout that is not new
    assert counters.all()


def test_a_captured_plan_of_attention_is_never_planned_again(
    capture: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = Causal() & SlidingWindow(3)
    expected = attention(*tensors(9), variant=variant)
    capture["on"] = True
    with pytest.raises(ForbiddenUnderCapture, match="lengths that it has no plan for"):
        attention(*tensors(8), variant=variant)
    for _ in range(2):  # as in two layers of one model
        assert torch.equal(attention(*tensors(9), variant=variant), expected)
    (captured,) = (entry.wrapper for entry in attention_module._captured)
    capture["on"] = False
    planned: list[object] = []
    plan = wrapper.AttentionWrapper.plan
    monkeypatch.setattr(
        wrapper.AttentionWrapper,
        "plan",
        lambda self, *a, **b: planned.append(self) or plan(self, *a, **b),
    )
    attention(*tensors(7), variant=variant)
    assert planned
    assert captured not in planned


def test_a_captured_plan_lives_as_long_as_its_graphs(capture: dict[str, int]) -> None:
    variant = Causal() & SlidingWindow(5)
    attention(*tensors(9), variant=variant)
    capture["on"] = True
    for _ in range(2):
        attention(*tensors(9), variant=variant)
    ((entry, hold),) = attention_module._captured._kept
    assert isinstance(hold, FakeHold)
    gone = weakref.ref(entry.wrapper)
    del entry
    capture["on"] = False
    for graphs in (1, 0):
        hold.graphs = graphs
        attention(*tensors(9), variant=Causal() & SlidingWindow(6), sm_scale=1.0 + graphs)
        gc.collect()
        assert (gone() is None) == (graphs == 0)


def test_a_graph_keeps_the_tensors_that_it_reads(
    capture: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of variants that came after the one that the wrapper was made with."""
    copies: list[weakref.ref[torch.Tensor]] = []

    def copied(field: Any, bound: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = bound.clone()
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(attention_args, "_on_device", copied)
    layers = [Alibi(torch.rand(2)) for _ in range(3)]
    for is_captured in (False, True):
        capture["on"] = is_captured
        copies.clear()
        for layer in layers:
            attention(*tensors(11), variant=layer)
    capture["on"] = False
    layers.clear()
    gc.collect()
    assert [copy() is not None for copy in copies] == [True] * 3
    attention_module._captured._kept.clear()
    gc.collect()
    assert [copy() for copy in copies] == [None] * 3


def test_a_capture_takes_no_wrapper_of_another_thread(capture: dict[str, int]) -> None:
    variant = Causal() & SlidingWindow(4)
    thread = threading.Thread(target=lambda: attention(*tensors(6), variant=variant))
    thread.start()
    thread.join()
    capture["on"] = True
    with pytest.raises(ForbiddenUnderCapture, match="in this thread before the capture"):
        attention(*tensors(6), variant=variant)


def test_captures_on_two_streams_share_no_plan(capture: dict[str, int]) -> None:
    variant = Causal() & SlidingWindow(2)

    def captured(stream: int) -> AttentionWrapper:
        capture.update(on=True, stream=stream)
        attention(*tensors(6), variant=variant)
        capture["on"] = False
        kept: list[Any] = list(attention_module._captured)
        found: AttentionWrapper = next(x.wrapper for x in kept if x.owner[2] == stream)
        return found

    attention(*tensors(6), variant=variant)
    first = captured(1)
    assert captured(1) is first
    with pytest.raises(ForbiddenUnderCapture, match="before one on several streams"):
        captured(2)
    capture["on"] = False
    attention(*tensors(6), variant=variant)
    assert captured(2) is not first
    assert captured(1) is first


class User:
    """Notes the streams that it is told of."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def taken(self, stream: Any) -> None:
        self.streams.append(stream.cuda_stream)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeStream], None]:
    """Makes a stream the current one."""
    known: dict[int, FakeStream] = {}
    current = [FakeStream(0)]

    def take(stream: FakeStream) -> None:
        known[stream.cuda_stream] = current[0] = stream

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(streams.shortcuts, "raw_stream", lambda _: current[0].cuda_stream)
    monkeypatch.setattr(streams, "is_capturing", lambda _: current[0].capture > 0)
    monkeypatch.setattr(streams, "capture_number", lambda handle: known[handle].capture)
    return take


def test_each_stream_waits_for_the_one_before(use: Callable[[FakeStream], None]) -> None:
    caller = [FakeStream(0), FakeStream(7), FakeStream(8)]
    order, user = streams.Streams(torch.device("cuda", 0)), User()
    order.tell(user.taken)
    for turn in (0, 0, 1, 2, 1, 0):
        use(caller[turn])
        assert order.current() == caller[turn].cuda_stream
    assert [stream.waited for stream in caller] == [[7], [0, 8], [7]]
    captured = FakeStream(9, capture=1)
    use(captured)
    assert order.current() == 9
    assert captured.waited == []  # an edge from work that is not captured ends a capture
    assert user.streams == [0, 7, 8, 7, 0]
    del user
    use(caller[2])
    assert order.current() == 8 and caller[2].waited == [7, 0]


def test_branches_of_one_capture_wait_for_each_other(use: Callable[[FakeStream], None]) -> None:
    first, second, apart = FakeStream(1), FakeStream(2, capture=5), FakeStream(3, capture=6)
    order = streams.Streams(torch.device("cuda", 0))
    use(first)
    order.current()  # the run before a capture, on the stream that is captured then
    first.capture = 5
    for stream in (first, first, second, apart, second, first):
        use(stream)  # another graph is captured at the same time, and must not be waited for
        order.current()
    assert first.waited == [2] and set(second.waited) == {1}
    assert apart.waited == []
    first.capture = second.capture = 0
    use(apart)
    order.current()
    assert apart.waited == []
    apart.capture = 0
    order.current()
    assert apart.waited == [1]  # the last that was not captured


def test_what_a_stream_reads_is_kept_until_it_has(
    use: Callable[[FakeStream], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the first stream, whose tensors another stream may have allocated."""
    kept: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    record = lambda _, stream: kept.append(stream.cuda_stream)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    order, user = streams.Streams(torch.device("cuda", 0)), User()
    order.tell(user.taken)
    use(FakeStream(7))
    order.used(torch.ones(1))
    assert kept == [7]
    order.current()
    use(FakeStream(9))
    order.used(torch.ones(1))  # as `select` on another stream than that of the runs
    assert kept == [7, 9, 7]
    use(FakeStream(7, capture=1))
    order.used(torch.ones(1))
    assert kept == [7, 9, 7] and user.streams == [7]
    use(FakeStream(7))
    order.current()
    assert user.streams == [7, 7]  # which records what the capture was given


def test_a_cache_too_small_is_named_under_capture_without_reading_the_plan(
    capture: dict[str, int],
) -> None:
    made = AttentionWrapper(Causal(), kv_format=Paged(4), **SHAPE)
    made.plan([0, 1], [0, 3], [5, 7, 2], [4])
    q, small = torch.zeros(1, 2, 64), torch.zeros(7, 2, 4, 2, 64)
    for is_on in (True, False):
        capture["on"] = is_on
        with pytest.raises(IndexOutOfRange, match=r"kv_indices\[1\] is 7; valid are 0 to 6"):
            made.run(q, small)


def test_plans_are_not_read_back_under_capture(capture: dict[str, int]) -> None:
    made = AttentionWrapper(Causal(), **SHAPE)
    made.plan([0, 1], [0, 3])
    capture["on"] = True
    with pytest.raises(ForbiddenUnderCapture, match="read back"):
        _ = made.planned.plan  # type: ignore[union-attr]
    with pytest.raises(ForbiddenUnderCapture, match="check_plan"):
        compiled(made).planner.check_status()
    capture["on"] = False
    assert made.planned is not None
    assert len(made.planned.plan.items) > 0
    compiled(made).planner.check_status()
