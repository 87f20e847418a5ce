"""Plans that only replays make, with a device that only says that it is captured.

The planner of the host stands for the kernel of the device: what is launched under capture runs
when the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_stream import FakeStream
from support.parts import compiled

import warploom as wl
from warploom.errors import NotPlanned, NotReplayed
from warploom.runtime.devices import graph, workspace
from warploom.runtime.formats.batch import Arguments, OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.strategies import device_strategy, planner, size_classes
from warploom.runtime.strategies.device_strategy import DeviceStrategy
from warploom.runtime.strategies.host_planner import HostPlanner
from warploom.runtime.strategies.site import Site
from warploom.scheduler.plans.verify import verify

PAGE = 4
BOUNDS = wl.Bounds(max_requests=4, max_q_rows=4, max_kv_len=64, max_blocks=64)


class Device:
    """Takes launches, and keeps those of a capture for replays."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.graph: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.graph:
            launch()


class Params:
    def set(self, name: str, value: int) -> None:
        assert name == "votes"


class PlannerOfDevice:
    """In place of `DevicePlanner`."""

    params = Params()

    def __init__(self, device: Device, planner: HostPlanner) -> None:
        self.device, self.planner = device, planner

    def write(self, batch: OnDevice, inputs: Inputs, site: Site, address: int) -> None:
        qo, kv, last, indices = batch.tensors

        def plan() -> None:
            measured = self.planner.measure(Arguments(qo, kv, indices, last), batch.bounds)
            assert measured is not None
            self.planner.plan(inputs, site, address)

        self.enqueued = plan

    def launch(self, stream: int) -> None:
        if self.device.is_capturing:
            self.device.graph.append(self.enqueued)
        else:
            self.enqueued()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()

    def planner_of(strategy: DeviceStrategy, site: Site) -> PlannerOfDevice:
        spec, heads = strategy._rules.spec, strategy._rules.heads
        has_roles = strategy._rules.always_has_roles
        return PlannerOfDevice(found, HostPlanner(spec.variant, spec.kv_format, heads, has_roles))

    def lengths(given: Arguments, *_: Any) -> tuple[Any, ...]:
        return given.qo_indptr, given.kv_indptr, given.last_page_len, given.kv_indices

    for module in (graph, workspace, size_classes, planner):
        monkeypatch.setattr(module, "is_capturing", lambda _: found.is_capturing)
    monkeypatch.setattr(device_strategy, "device_lengths", lengths)
    monkeypatch.setattr(DeviceStrategy, "_planner", planner_of)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream(1))
    yield found
    found.is_capturing = False


def make(bounds: wl.Bounds = BOUNDS, tile: wl.TileConfig | None = None) -> wl.AttentionWrapper:
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=4, num_kv_heads=2, head_dim=16,
        dtype="float32", device="cpu", bounds=bounds, cuda_graph=True, tile=tile,
    )  # fmt: skip
    strategy: Any = compiled(attention).planner._strategies[0]
    assert isinstance(strategy, DeviceStrategy)
    strategy._may_be = True
    return attention


def lists(*kv_lens: int, q_lens: list[int] | None = None) -> list[torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len of requests with one query row each, or
    as many as are given."""
    lens = np.array(kv_lens)
    pages = -(-lens // PAGE)
    parts = (
        np.append(0, np.cumsum([1] * len(lens) if q_lens is None else q_lens)),
        np.append(0, np.cumsum(pages)),
        np.arange(pages.sum()),
        np.where(lens > 0, (lens - 1) % PAGE + 1, 0),
    )
    return [torch.from_numpy(part.astype(np.int32)) for part in parts]


def captured(device: Device, attention: wl.AttentionWrapper, given: list[torch.Tensor]) -> Any:
    device.is_capturing = True
    attention.plan(*given)
    device.is_capturing = False
    assert attention.planned is not None and type(attention.planned.batch) is OnDevice
    return attention.planned


def junk(attention: wl.AttentionWrapper, value: int) -> None:
    compiled(attention).planner._memory.workspace.plan_ints.fill_(value)


@pytest.mark.parametrize("value", [0, 1, -1, 7, 2**31 - 1])
def test_memory_without_a_plan_is_not_read_as_one(device: Device, value: int) -> None:
    attention = make()
    planned = captured(device, attention, lists(9, 30))
    junk(attention, value)
    for read in (lambda: planned.plan, lambda: planned.visibility, lambda: planned.arrays.kv_lens):
        with pytest.raises(NotReplayed, match="Replay the graph first"):
            read()
    facts = attention.explain().facts
    assert str(facts["plan"]).startswith("not made yet, by the device: ")
    assert "work items" not in facts and "workspace" in facts and "kernel" in facts


def test_an_earlier_plan_is_not_told_as_the_captured_one(device: Device) -> None:
    attention = make()
    attention.plan(*lists(5))
    assert "5 keys" in str(attention.explain().facts["batch"])
    planned = captured(device, attention, lists(9, 30))
    with pytest.raises(NotPlanned):
        _ = planned.plan
    assert "batch" not in attention.explain().facts


def test_what_a_replay_made_is_told(device: Device) -> None:
    attention = make()
    planned = captured(device, attention, lists(9, 30))
    junk(attention, -1)
    device.replay()
    verify(planned.plan, planned.visibility)
    assert "39 keys" in str(attention.explain().facts["batch"])
    assert "plan" not in attention.explain().facts


def test_of_two_graphs_the_one_that_was_replayed_is_told(device: Device) -> None:
    attention = make()
    captured(device, attention, lists(5))
    first, device.graph = device.graph, []
    planned = captured(device, attention, lists(9, 30))
    device.replay()
    second, device.graph = device.graph, first
    device.replay()
    with pytest.raises(NotReplayed):
        _ = planned.plan
    device.graph = second
    device.replay()
    assert planned.plan.segments["kv_len"].tolist() == [9, 30]


def test_a_status_that_nobody_wrote_is_no_reason(device: Device) -> None:
    attention = make()
    captured(device, attention, lists(9, 30))
    junk(attention, 2**31 - 1)
    with pytest.raises(NotReplayed):
        attention.check_plan()
    device.replay()
    attention.check_plan()


def test_a_trace_is_of_what_the_last_replay_made(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_TRACE", "1")
    attention, given = make(), lists(9, 30)
    captured(device, attention, given)
    with pytest.raises(NotReplayed):
        wl.trace(attention)
    q, cache = torch.randn(4, 4, 16), torch.randn(2, 12, PAGE, 2, 16)
    for kv_lens in ((9, 30), (30, 11)):
        for mine, new in zip(given, lists(*kv_lens), strict=True):
            mine.copy_(new)
        device.replay()
        attention.run(q, tuple(cache))
        items = wl.trace(attention).items
        ends = [items["kv_end"][items["request"] == request].max() for request in (0, 1)]
        assert ends == list(kv_lens)


def test_replays_of_two_roles_go_from_mix_to_mix(device: Device) -> None:
    """Prefills beside decodes, and either alone, of which replays find the lengths in memory."""
    requests, rows, pages = 6, 60, 64
    tile = wl.TileConfig(16, 64, decode=wl.TileConfig(4, 64))
    attention = make(wl.Bounds(requests, rows, 80, pages), tile)
    eager = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=4, num_kv_heads=2, head_dim=16,
        dtype="float32", device="cpu", backend="reference",
    )  # fmt: skip
    q, cache = torch.randn(rows, 4, 16), torch.randn(2, pages, PAGE, 2, 16)

    def padded(q_lens: list[int], kv_lens: list[int]) -> list[torch.Tensor]:
        left = [0] * (requests - len(q_lens))
        found = lists(*kv_lens, *left, q_lens=[*q_lens, *left])
        found[2] = torch.nn.functional.pad(found[2], (0, pages - len(found[2])))
        return found

    mixes: list[tuple[list[int], list[int], set[int]]] = [
        ([30, 1, 1, 0, 2], [60, 70, 9, 5, 30], {0, 1}),
        ([1] * 6, [40, 1, 0, 33, 80, 7], {1}),
        ([25, 35], [25, 80], {0}),
        ([], [], set()),
        ([1, 40, 1], [80, 40, 3], {0, 1}),
    ]
    given = padded(*mixes[0][:2])
    planned = captured(device, attention, given)
    for q_lens, kv_lens, roles in mixes * 2:
        for mine, new in zip(given, padded(q_lens, kv_lens), strict=True):
            mine.copy_(new)
        device.replay()
        attention.check_plan()
        read = planned.read()
        verify(read.plan, read.visibility)
        assert set(read.plan.role.tolist()) == roles
        out, count = torch.full_like(q, 7.0), sum(q_lens)
        attention.run(q, tuple(cache), out=out)
        assert (out[count:] == 7.0).all()
        if count:
            eager.plan(*lists(*kv_lens, q_lens=q_lens))
            expected = eager.run(q[:count], tuple(cache))
            torch.testing.assert_close(out[:count], expected, atol=1e-4, rtol=1e-4)
