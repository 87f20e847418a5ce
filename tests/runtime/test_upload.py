"""Plans on their way to the device: when a stage is packed again, and who copies it."""

from __future__ import annotations

import ctypes
import gc
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from warploom.runtime.devices import cuda, delivery, upload
from warploom.runtime.devices.upload import Upload

DEVICE = torch.device("cuda", 0)
INVALID_CONTEXT = 201


class FakeEvent:
    """Counts how often it was recorded on which stream, and how often it was waited for.

    Attributes:
        is_done: what is asked, it says.
        cuda_event: its handle, once it was recorded.
    """

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.waits = self.cuda_event = 0
        self.is_done = True

    def record(self, stream: Any = "made") -> None:
        self.recorded.append(stream)
        self.cuda_event = id(self)

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waits += 1


class FakeDevice:
    """A device whose copies are done at once.

    Attributes:
        streams: names of the streams that were current, the last one now.
        copies: stream and bytes of each copy that the driver made.
        status: of the driver's copies; those that fail do nothing.
        current: index of the current device.
    """

    def __init__(self) -> None:
        self.streams = ["first"]
        self.copies: list[tuple[int, int]] = []
        self.status = 0
        self.current = 0

    def copy(self, target: int, source: int, size: int, stream: int) -> int:
        if self.status == 0:
            ctypes.memmove(target, source, size)
            self.copies.append((stream, size))
        return self.status


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found, empty = FakeDevice(), torch.empty
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(upload, "beside_captures", nullcontext)
    monkeypatch.setattr(delivery, "driver_entries", lambda *names: [0] * len(names))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.streams[-1])
    monkeypatch.setattr(upload.shortcuts, "raw_stream", lambda _: len(found.streams))
    monkeypatch.setattr(upload.shortcuts, "current_device", lambda: found.current)
    for name in ("copy_to_device", "copy_on_device"):
        monkeypatch.setattr(upload, name, lambda: found.copy)
    monkeypatch.setattr(upload, "_spare", defaultdict(list))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, **_: empty(size, dtype=dtype))
    return found


def test_a_stage_is_packed_again_when_its_copy_is_done(device: FakeDevice) -> None:
    """That of the plan before at once; if a copy still reads it, the next, which is waited for."""
    sender = Upload(DEVICE)
    events: Any = [stage.event for stage in sender._ring]
    staged = []
    for turn in range(7):
        is_busy = turn >= 2
        for event in events:
            event.is_done = not is_busy
        target = torch.zeros(8 if turn < 5 else 9, dtype=torch.int32)
        staged.append(sender.stage(target).buffer)
        assert sum(event.waits for event in events) == max(0, turn - 1)
        staged[-1].fill_(turn)
        if turn == 5:
            device.streams.append("second")
        sender.send(5)
        assert target[:8].tolist() == [turn] * 5 + [0] * 3
    assert device.copies == [(1, 20)] * 5 + [(2, 20)] * 2
    assert staged[0] is staged[1]
    assert len({buffer.data_ptr() for buffer in staged[1:5]}) == 4
    assert [len(buffer) for buffer in staged] == [8] * 5 + [9] * 2
    assert [event.recorded for event in events] == [
        ["made", "first", "first", "second"], ["made", "first", "second"], ["made", "first"],
        ["made", "first"],
    ]  # fmt: skip


def test_a_stage_whose_copy_no_event_tells_of_is_not_next(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may come between the copy and the event."""
    sender, target = Upload(DEVICE), torch.zeros(8, dtype=torch.int32)
    stage = sender.stage(target)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FakeEvent, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.send(8)
    assert device.copies
    assert sender.stage(target) is not stage


@pytest.mark.parametrize(("status", "current"), [(INVALID_CONTEXT, 0), (0, 1)])
def test_torch_copies_what_the_driver_cannot(device: FakeDevice, status: int, current: int) -> None:
    device.status, device.current = status, current
    sender, target = Upload(DEVICE), torch.zeros(8, dtype=torch.int32)
    sender.stage(target).buffer.fill_(3)
    sender.send(5)
    assert target.tolist() == [3] * 5 + [0] * 3
    assert device.copies == []
    assert sender._ring[0].event.recorded == ["made", "first"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "current", "where"), [(0, 0, 0), (INVALID_CONTEXT, 0, 0), (0, 1, 0), (0, 0, 1)]
)
def test_page_numbers_of_the_device_are_copied_there(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, status: int, current: int, where: int
) -> None:
    """By the driver, or by torch where it cannot or they lie on another device."""
    device.status, device.current = status, current
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: where)
    sender, target = Upload(DEVICE), torch.zeros(8, dtype=torch.int32)
    sender.stage(target).buffer.fill_(3)
    sender.append(torch.arange(5, 9, dtype=torch.int32), 4, 3)
    assert target.tolist() == [0] * 4 + [5, 6, 7, 0]
    assert device.copies == ([(1, 12)] if status == current == where == 0 else [])


def test_stages_outlive_their_upload_for_the_next_one(device: FakeDevice) -> None:
    sender, target = Upload(DEVICE), torch.zeros(8, dtype=torch.int32)
    sender.stage(target)
    sender.send(8)
    stages = list(sender._ring)
    del sender
    gc.collect()
    taken = Upload(DEVICE)._ring
    assert {id(stage) for stage in taken} == {id(stage) for stage in stages}
    other = Upload(torch.device("cuda", 1))._ring
    assert not {id(stage) for stage in other} & {id(stage) for stage in stages}


@pytest.mark.parametrize(
    ("copies", "named"),
    [(cuda.copy_to_device, b"cuMemcpyHtoDAsync"), (cuda.copy_on_device, b"cuMemcpyDtoDAsync")],
    ids=["to", "on"],
)
def test_the_copy_is_the_drivers_own(
    copies: Any, named: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @cuda._MemcpyAsync
    def memcpy(target: int, source: int, size: int, stream: int | None) -> int:
        calls.append((target, source, size, stream))
        return INVALID_CONTEXT

    class Driver:
        def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
            assert (name, version, flags) == (named, 11080, 0)
            return 0, ctypes.cast(memcpy, ctypes.c_void_p).value or 0, 0

    monkeypatch.setattr(cuda, "load_driver", Driver)
    copy = copies.__wrapped__()
    assert copy(2**47, 2**46, 2**33, 7) == INVALID_CONTEXT
    assert calls == [(2**47, 2**46, 2**33, 7)]
