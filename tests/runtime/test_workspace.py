"""Who may use the bytes of a workspace, wrappers that share them and streams; for which tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.dsl.formats import Ragged
from warploom.dsl.library.causal import Causal
from warploom.errors import PlanMismatch
from warploom.runtime.launch import Launcher
from warploom.runtime.workspace import Workspace
from warploom.runtime.wrapper import AttentionWrapper
from warploom.scheduler.capacity import WorkspaceSize

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


def test_who_takes_memory_over_waits_for_its_last_user() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)
    followed: list[str] = []
    spaces = [Workspace(CPU, memory[begin:]) for begin in (0, 0, SIZE.total)]
    for name, space in zip(("first", "second", "apart"), spaces, strict=True):
        streams: Any = SimpleNamespace(name=name, follow=lambda other: followed.append(other.name))
        space.streams = streams
    for space in spaces:
        space.fit(SIZE)
    followed.clear()
    spaces[2].fit(SIZE)
    assert followed == ["apart"]
    spaces[0].fit(SIZE)
    assert sorted(followed[1:]) == ["first", "second"]


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


class FakeTensor:
    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_memory_that_may_be_dropped_is_kept_for_each_stream_that_reads_it() -> None:
    memory, copied, on_host = FakeTensor(True), FakeTensor(True), FakeTensor(False)
    launcher: Any = SimpleNamespace(
        _workspace=SimpleNamespace(memory=memory),
        _inputs=SimpleNamespace(tensors={"a": copied, "b": on_host}),
    )
    for stream in ("one", "other"):
        Launcher._used_on(launcher, stream)  # type: ignore[arg-type]
    assert memory.streams == copied.streams == ["one", "other"]
    assert on_host.streams == []


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
        planned, room = wrapper.planned, wrapper._planner._room
        assert planned is not None and room is not None
        found.append((planned.kernel.tile.rows, room))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    weights = (q[:, 0] @ k[:keys, 0].T / 8).softmax(-1)
    torch.testing.assert_close(out[:, 0], weights @ v[:keys, 0], atol=1e-5, rtol=1e-4)
