"""Graphs that hold something of ours, with a driver that lets a test destroy them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from warploom.runtime.devices import graph_hold
from warploom.runtime.devices.graph_hold import GraphHold, KeptForGraphs

DEVICE = torch.device("cuda", 0)


class FakeDriver:
    """Captures into graph `number`, and destroys graphs as the driver does."""

    def __init__(self) -> None:
        self.number = 1
        self.status = {"cuStreamGetCaptureInfo": 0, "cuUserObjectCreate": 0, "retain": 0}
        self.graphs: dict[int, list[tuple[int, int]]] = {}

    def CUhostFn(self, address: int) -> int:
        return address

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return self.status["cuStreamGetCaptureInfo"], 1, self.number, f"g{self.number}", [], 0

    def cuUserObjectCreate(self, data: int, destroy: int, count: int, flags: int) -> Any:
        assert (count, flags) == (1, 1)
        return self.status["cuUserObjectCreate"], (destroy, data)

    def cuGraphRetainUserObject(self, graph: str, held: Any, count: int, flags: int) -> Any:
        assert (count, flags) == (1, 1)
        if self.status["retain"] == 0:
            self.graphs.setdefault(int(graph[1:]), []).append(held)
        return (self.status["retain"],)

    def destroy(self, number: int) -> None:
        for function, data in self.graphs.pop(number):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(graph_hold, "load_driver", lambda: found)
    monkeypatch.setattr(graph_hold, "raw_stream", lambda index: 7)
    return found


def test_what_no_graph_holds_is_released() -> None:
    assert GraphHold().is_released()


def test_released_when_the_last_graph_is_destroyed(driver: FakeDriver) -> None:
    hold = GraphHold()
    for driver.number in (1, 1, 2, 1):
        hold.attach(DEVICE)
    assert {number: len(held) for number, held in driver.graphs.items()} == {1: 1, 2: 1}
    assert not hold.is_released()
    driver.destroy(1)
    assert not hold.is_released()
    driver.destroy(2)
    assert hold.is_released()
    driver.number = 3
    hold.attach(DEVICE)
    assert not hold.is_released()


@pytest.mark.parametrize("call", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "retain"])
def test_a_graph_that_cannot_be_watched_holds_forever(driver: FakeDriver, call: str) -> None:
    hold = GraphHold()
    hold.attach(DEVICE)
    driver.status[call] = 1
    driver.number = 2
    hold.attach(DEVICE)
    driver.destroy(1)
    assert not hold.is_released()


def test_what_graphs_read_is_kept_until_the_last_is_destroyed(driver: FakeDriver) -> None:
    """Equal things are two things."""
    kept, first, second = KeptForGraphs[list[int]](), [1], [1]
    kept.keep(first, DEVICE)
    driver.number = 2
    for thing in (second, first):
        kept.keep(thing, DEVICE)
    assert [thing is first for thing in kept] == [True, False]
    driver.destroy(1)
    kept.drop_released()
    assert first in kept and second in kept and [1] not in kept
    driver.destroy(2)
    kept.drop_released()
    assert first not in kept and not list(kept)
