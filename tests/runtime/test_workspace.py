"""Who may use the bytes of a workspace, wrappers that share them and streams; for which tiles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.fake_stream import FakeStream
from support.parts import compiled

from warploom.dsl.library.causal import Causal
from warploom.dsl.types.formats import Ragged
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import PlanMismatch, WrongStride
from warploom.runtime.devices import streams, tenancy
from warploom.runtime.devices.streams import Streams
from warploom.runtime.devices.tenancy import Tenancy
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.planning.plan_status import REASONS
from warploom.runtime.tensors import shortcuts
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.layout import HEADER
from warploom.scheduler.plans.capacity import WorkspaceSize

CPU = torch.device("cpu")
SIZE = WorkspaceSize(512, 0, 0, 256)


def holds(space: Workspace) -> bool:
    try:
        space.check_held()
    except PlanMismatch:
        return False
    return True


@pytest.mark.parametrize(
    ("begin", "is_shared"), [(0, True), (256, True), (SIZE.total - 16, True), (SIZE.total, False)]
)
def test_slices_that_share_bytes_are_held_by_the_last_to_plan(begin: int, is_shared: bool) -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    first, second = Workspace(CPU, memory), Workspace(CPU, memory[begin:])
    first.fit(SIZE)
    assert holds(first)
    assert not holds(second)  # it has no plan
    second.fit(SIZE)
    assert holds(second)
    assert holds(first) != is_shared
    first.fit(SIZE)
    assert holds(first)
    assert holds(second) != is_shared


class FakeStreams:
    """Order that notes whose work it followed."""

    def __init__(self, name: str, followed: list[str]) -> None:
        self.name, self.followed = name, followed

    def follow(self, other: FakeStreams) -> None:
        self.followed.append(other.name)


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tenancy]:
    monkeypatch.setattr(tenancy, "_tenancies", [])

    def make(begin: int, name: str, followed: list[str]) -> Tenancy:
        streams: Any = FakeStreams(name, followed)
        return Tenancy(begin, streams)

    return make


def test_memory_at_an_odd_address_is_refused_with_what_helps() -> None:
    """A contiguous tensor's .contiguous() is itself, at the same address."""
    odd = torch.empty(4097, dtype=torch.uint8)[1:]
    with pytest.raises(WrongStride, match=r"begins 1 past one\. Give a slice .* \.clone\(\) of it"):
        Workspace(CPU, odd.contiguous())
    Workspace(CPU, odd.clone())
    Workspace(CPU, odd[15:])
    with pytest.raises(WrongStride, match=r"must be contiguous\. Call \.contiguous\(\) on it"):
        Workspace(CPU, odd[15::2])


def test_who_takes_memory_over_waits_for_its_last_user(tenants: Callable[..., Tenancy]) -> None:
    followed: list[str] = []
    first, second, apart = (tenants(*at, followed) for at in ((0, "1st"), (0, "2nd"), (512, "far")))
    for tenant in (first, second, apart):
        tenant.take(512)
    assert followed == ["1st"]
    first.take(512)
    assert followed == ["1st", "2nd"]
    second.take(600)
    assert not apart.is_held
    second.take(512)
    followed.clear()
    apart.take(512)
    assert followed == ["2nd"]  # what that enqueued before it shrank
    assert second.is_held


def test_what_a_wrapper_that_is_gone_has_enqueued_is_awaited(
    tenants: Callable[..., Tenancy],
) -> None:
    followed: list[str] = []
    gone, half, whole = (tenants(0, name, followed) for name in ("gone", "half", "whole"))
    gone.take(512)
    gone.leave()
    half.take(256)
    assert followed == ["gone"]
    whole.take(512)
    assert followed == ["gone", "gone", "half"]
    assert tenancy._tenancies == [half, whole]  # who waits for those waits for it
    half.take(512)
    assert followed[3:] == ["whole"]


def test_a_workspace_that_is_gone_leaves_its_memory() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    begin = memory.data_ptr()
    for _ in range(5):  # the caller's memory, from which allocators give the same addresses
        Workspace(CPU, memory).fit(SIZE)
        Workspace(CPU, memory)  # has no plan, ever
    gc.collect()
    kept = [tenant for tenant in tenancy._tenancies if tenant._begin == begin]
    assert len(kept) <= 1
    assert all(tenant._is_left for tenant in kept)


def test_counters_are_cleared_in_the_order_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a wrapper that is made, and plans later."""
    one, other = FakeStream(1), FakeStream(2)
    now = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[0])
    monkeypatch.setattr(shortcuts, "raw_stream", lambda _: now[0].cuda_stream)
    monkeypatch.setattr(streams, "is_capturing", lambda _: False)
    memory = torch.empty(4096, dtype=torch.uint8)
    first, second = Workspace(CPU, memory), Workspace(CPU, memory)
    for space in (first, second):
        assert space._tenancy is not None
        space.streams = space._tenancy._streams = Streams(torch.device("cuda", 0))
    for space, stream in ((first, one), (second, other), (first, one)):
        now[0] = stream
        space.fit(SIZE)
    assert other.waited == [1]
    assert one.waited == [2]


def test_threads_may_make_and_share_workspaces() -> None:
    def work() -> None:
        for _ in range(300):
            Workspace(CPU, torch.empty(1024, dtype=torch.uint8)).fit(SIZE)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()


def test_bytes_beyond_the_layout_are_nobodys() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    first, second = Workspace(CPU, memory), Workspace(CPU, memory[1024:])
    first.fit(SIZE)
    second.fit(SIZE)
    assert holds(first)
    first.fit(WorkspaceSize(1536, 0, 0, 256))
    assert not holds(second)


def test_what_new_memory_held_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that only replays make is not there before the first, whatever was."""

    def old(size: int, **given: Any) -> torch.Tensor:
        return torch.zeros(size, **given)  # a status that plans have

    monkeypatch.setattr(torch, "empty", old)
    space = Workspace(CPU)
    space.fit(SIZE)
    status = [name for name, _ in HEADER.fields].index("status")
    assert not 0 <= int(space.plan_ints[status]) < len(REASONS)


class TwoBiases(Variant):
    near = Tensor("float32", (None,))
    far = Tensor("float32", (None,))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.near[at.kv_pos] + self.far[at.kv_pos]


def test_memory_that_may_be_dropped_is_kept_for_each_stream_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, near, far = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(4), torch.ones(4)
    wrapper = AttentionWrapper(
        TwoBiases(near=near, far=far), num_q_heads=1, head_dim=32, device="cpu", workspace=memory
    )
    wrapper.plan([0, 4], [0, 4])
    launcher = compiled(wrapper).launcher
    assert launcher is not None
    kept: list[tuple[int, Any]] = []
    # a machine without a device, on which all but `far` lies
    is_cuda = property(lambda x: x.data_ptr() != far.data_ptr())
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: kept.append((x.data_ptr(), stream))
    )
    for stream in ("one", "other"):
        launcher._used_on(stream)  # type: ignore[arg-type]
    read = memory.data_ptr(), near.data_ptr()
    assert sorted(kept) == sorted((at, stream) for stream in ("one", "other") for at in read)


@pytest.mark.parametrize("rows", [1, 12, 13, 200, 1535, 1536, 5000])
def test_every_tile_that_a_plan_can_choose_is_known_before(rows: int) -> None:
    wrapper = AttentionWrapper(
        Causal(), kv_format=Ragged(), num_q_heads=1, num_kv_heads=1, head_dim=32, device="cpu"
    )
    wrapper.plan([0, rows], [0, rows])
    assert wrapper.planned is not None
    assert wrapper.planned.kernel.tile.rows in {tile.rows for tile in wrapper.tiles()}


def test_tiles_of_other_heights_do_not_share_addresses_of_partial_results() -> None:
    requests, keys = 32, 4000
    memory = torch.zeros(64 << 20, dtype=torch.uint8)  # never moves
    wrapper = AttentionWrapper(
        kv_format=Ragged(), num_q_heads=1, num_kv_heads=1, head_dim=64, device="cpu",
        dtype="float32", workspace=memory,
    )  # fmt: skip
    q, k, v = torch.randn(requests, 1, 64), *torch.randn(2, requests * keys, 1, 64)
    kv_indptr = [keys * i for i in range(requests + 1)]
    found = []
    for qo_indptr in (list(range(requests + 1)), [0] + [requests] * requests):
        wrapper.plan(qo_indptr, kv_indptr)
        out = wrapper.run(q, (k, v))
        planned, room = wrapper.planned, compiled(wrapper).planner._memory.room
        assert planned is not None and room is not None
        found.append((planned.kernel.tile.rows, room))
    assert found[0][0] != found[1][0]
    assert found[0][1].offsets == found[1][1].offsets
    weights = (q[:, 0] @ k[:keys, 0].T / 8).softmax(-1)
    torch.testing.assert_close(out[:, 0], weights @ v[:keys, 0], atol=1e-5, rtol=1e-4)
