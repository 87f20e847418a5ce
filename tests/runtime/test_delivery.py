"""Plans that compiled code sends to their device, beside a driver that copies on the host."""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_at
from support.on_gpu import GPU, OnGpu, arguments, same_plans

import warploom as wl
import warploom.templates
from warploom.codegen.planner_source import OUTPUTS, SITE
from warploom.runtime.devices import delivery, upload
from warploom.runtime.devices.delivery import STAGES
from warploom.runtime.devices.upload import Upload
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.strategies.host_planner import HostPlanner
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.index_arrays import IndexArrays

INVALID_CONTEXT = 201
TEMPLATES = Path(warploom.templates.__file__).parent
PAGED = wl.Paged(16)
STREAM = 77


class Event:
    """Torch's: it has no handle until it is recorded first."""

    def __init__(self) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        self.cuda_event = self.cuda_event or id(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Driver:
    """Functions as the driver has them, called by their addresses.

    Attributes:
        calls: names, and what they were given beside addresses of memory.
        fails: functions that do nothing but return an error.
        captures: the stream is being captured.
        mode: of captures, of the thread; 2 is relaxed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.captures = False
        self.mode = 0
        int_, at, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        status = ctypes.POINTER(ctypes.c_int)
        kinds: dict[str, tuple[Any, ...]] = {
            "cuThreadExchangeStreamCaptureMode": (status,), "cuStreamIsCapturing": (at, status),
            "cuEventQuery": (at,), "cuEventSynchronize": (at,),
            "cuMemcpyHtoDAsync": (at, at, size, at), "cuMemcpyDtoDAsync": (at, at, size, at),
            "cuEventRecord": (at, at),
        }  # fmt: skip
        self._functions = {
            name: ctypes.CFUNCTYPE(int_, *kinds[name])(self._called(name)) for name in kinds
        }

    def _called(self, name: str) -> Any:
        def call(*args: Any) -> int:
            fails = name in self.fails
            if name == "cuStreamIsCapturing":
                self.calls.append((name, args[0]))
                args[1][0] = int(self.captures)
            elif name == "cuThreadExchangeStreamCaptureMode":
                self.calls.append((name, args[0][0]))
                args[0][0], self.mode = self.mode, args[0][0]
            elif "Memcpy" in name:
                self.calls.append((name, *args[2:]))
                if not fails:
                    ctypes.memmove(*args[:3])
            else:
                self.calls.append((name, *args))
            return INVALID_CONTEXT if fails else 0

        return call

    def entries(self, *names: str) -> tuple[int, ...]:
        return tuple(ctypes.cast(self._functions[n], ctypes.c_void_p).value or 0 for n in names)


class Sending(OnGpu):
    """One whose plans are staged, and sent to memory of the host that stands for the device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, variant=wl.Causal(), kv_format=PAGED)
        self.driver, empty = Driver(), torch.empty
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(upload.shortcuts, "raw_stream", lambda _: STREAM)
        monkeypatch.setattr(upload.shortcuts, "current_device", lambda: 0)
        monkeypatch.setattr(delivery, "driver_entries", self.driver.entries)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(upload, "beside_captures", nullcontext)
        for name in ("copy_to_device", "copy_on_device"):  # of the long way
            monkeypatch.setattr(upload, name, lambda: lambda *_: INVALID_CONTEXT)
        monkeypatch.setattr(upload, "_spare", defaultdict(list))
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **k: empty(*size, **k))
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
        self.planner._memory.upload = Upload(GPU)

    @property
    def upload(self) -> Upload:
        return self.planner._memory.upload

    def steady(self) -> None:
        """Plan until the next batch may be planned in few calls."""
        for step in range(3):
            self.planner.plan(self.planner.read(batch(step)), self.inputs)

    def lengthen(self) -> None:
        """Make all stages as long as the first, as plans do that a device does not keep up with."""
        for turn in range(STAGES):
            self.upload._delivery.last = turn
            self.upload.stage(self.planner._memory.workspace.plan_ints)
        self.upload._delivery.last = 0

    def sent(self) -> list[int]:
        return self.planner._memory.workspace.plan_ints.tolist()


def batch(step: int) -> Arguments:
    return arguments([(1, 3000 + 17 * step + 100 * i) for i in range(9)], PAGED, step)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Sending:
    found = Sending(monkeypatch)
    found.steady()
    return found


def staying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let page numbers lie on the device: planners may not read them."""
    known = HostPlanner.known

    def on_device(self: HostPlanner, given: Arguments) -> IndexArrays | None:
        found = known(self, given)
        if found is None:
            return None
        return found._replace(addresses=[*found.addresses[:-1], 0])

    monkeypatch.setattr(HostPlanner, "known", on_device)


def the_long_way(monkeypatch: pytest.MonkeyPatch, given: Arguments, stay: bool) -> Planned:
    made = OnGpu(monkeypatch, variant=wl.Causal(), kv_format=PAGED)
    planned = made.plan(given, is_short=False)[0]
    if stay:  # nobody has looked which page is the last
        planned.batch.kv_extent = 0
    return planned


@pytest.fixture(params=[False, True], ids=["pages on the host", "on the device"])
def stay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether page numbers lie on the device."""
    if request.param:
        staying(monkeypatch)
    return bool(request.param)


@pytest.mark.parametrize("is_busy", [False, True], ids=["the last is free", "all are read"])
def test_what_is_sent_is_the_plan_of_the_long_way(
    made: Sending, monkeypatch: pytest.MonkeyPatch, stay: bool, is_busy: bool
) -> None:
    """From the stage of the plan before, if its copy is done, or else from the next."""
    made.lengthen()
    driver, handles = made.driver, [stage.event.cuda_event for stage in made.upload._ring]
    driver.fails = {"cuEventQuery"} if is_busy else set()
    awaits = ["cuEventSynchronize"] if is_busy else []
    copies = ["cuMemcpyDtoDAsync", "cuMemcpyHtoDAsync"] if stay else ["cuMemcpyHtoDAsync"]
    for step in range(5, 11):  # once around the ring, and more
        driver.calls.clear()
        planned = made.planner.replan(batch(step))
        assert planned is not None
        modes = [call for call in driver.calls if call[0] == "cuThreadExchangeStreamCaptureMode"]
        assert [mode for _, mode in modes] == [2, 0] and driver.mode == 0
        asked = driver.calls[driver.calls.index(modes[0]) + 1 : driver.calls.index(modes[1])]
        assert [call[0] for call in asked] == ["cuEventQuery", *awaits]
        driver.calls = [call for call in driver.calls if call not in modes]
        names = [call[0] for call in driver.calls]
        assert names == ["cuStreamIsCapturing", "cuEventQuery", *awaits, *copies, "cuEventRecord"]
        streams = [call[-1] for call in driver.calls if call[0].startswith(("cuS", "cuM"))]
        assert streams == [STREAM] * len(streams)
        last, taken = ((step - 5) % STAGES, (step - 4) % STAGES) if is_busy else (0, 0)
        assert driver.calls[1][1] == handles[last]
        assert driver.calls[-1][1:] == (handles[taken], STREAM)
        assert not is_busy or driver.calls[2][1] == handles[taken]
        same_plans(planned, the_long_way(monkeypatch, batch(step), stay))


@pytest.mark.parametrize(
    "failing",
    ["captures", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuEventSynchronize"],
)
def test_nothing_is_written_where_nothing_may_be_sent(made: Sending, failing: str) -> None:
    made.lengthen()
    stages = [stage.buffer.clone() for stage in made.upload._ring]
    before, number = made.sent(), made.planner._memory.number
    made.driver.fails, made.driver.captures = {failing, "cuEventQuery"}, failing == "captures"
    assert made.planner.replan(batch(9)) is None
    assert made.sent() == before and made.planner._memory.number == number
    for stage, old in zip(made.upload._ring, stages, strict=True):
        assert torch.equal(stage.buffer, old)


@pytest.mark.parametrize("failing", ["cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuEventRecord"])
def test_torch_sends_what_the_driver_refuses(
    made: Sending, monkeypatch: pytest.MonkeyPatch, failing: str, stay: bool
) -> None:
    made.lengthen()
    made.driver.fails = {failing, "cuEventQuery"}
    planned = made.planner.replan(batch(9))
    assert planned is not None and made.upload._delivery.last == 1
    same_plans(planned, the_long_way(monkeypatch, batch(9), stay))


def test_another_target_or_device_goes_the_long_way(
    made: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, target = made.upload, made.planner._memory.workspace.plan_ints
    assert sender.delivery(torch.zeros(len(target), dtype=torch.int32), None) is None
    monkeypatch.setattr(upload.shortcuts, "current_device", lambda: 1)
    assert sender.delivery(target, None) is None
    monkeypatch.setattr(upload.shortcuts, "current_device", lambda: 0)
    assert sender.delivery(target, None) is not None
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    assert sender.delivery(target, torch.zeros(1)) is None


def test_stages_that_are_too_short_are_made_longer_by_the_long_way(made: Sending) -> None:
    """One is enough, as long as the device keeps up; the others are told of nothing."""
    ring, length = made.upload._ring, made.upload._target.length
    assert [stage.length for stage in ring] == [length, 0, 0, 0]
    made.driver.fails = {"cuEventQuery"}
    assert made.planner.replan(batch(9)) is None
    ring[1].event.query = lambda: False  # type: ignore[method-assign]
    made.steady()
    assert [stage.length for stage in ring] == [length, 0, length, 0]
    assert [stage.memory for stage in made.upload._delivery.stages] == [
        ring[0].address, None, ring[2].address, None
    ]  # fmt: skip


def test_an_interrupt_leaves_no_half_of_what_compiled_code_is_told(made: Sending) -> None:
    """Wherever it comes while the target changes: the old target is no other memory by then."""
    sender, longer = made.upload, torch.zeros(10**6, dtype=torch.int32)
    before = made.planner._memory.workspace.plan_ints
    step = 0
    for step in range(10**3):
        sender.stage(before)
        with interrupted_at(step, Upload) as came:
            sender.stage(longer)
        told, aimed = sender._delivery, sender._target
        if aimed.buffer is before or aimed.buffer is longer:
            assert told.target == aimed.address
            for each, stage in zip(told.stages, sender._ring, strict=True):
                assert each.memory in (None, stage.address)
                assert each.memory is None or stage.length >= aimed.length
        for buffer in (before, longer):  # else there is nothing that compiled code may send
            assert (sender.delivery(buffer, None) is not None) == (aimed.buffer is buffer)
        if not came:
            break
    assert step > 20


def test_an_interrupt_leaves_no_planner_with_half_of_a_site(made: Sending) -> None:
    """The parameters are those of the site that it says it has written, in memory that is there."""
    planner: Any = made.planner._strategies[1]._last
    site: Any = planner._written
    other: Any = SimpleNamespace(
        numbers=[number + 1 for number in site.numbers], scratch=site.scratch,
        outputs=site.outputs,
    )  # fmt: skip
    planner._plan = lambda *_: 0
    step = 0
    for step in range(10**3):
        planner.plan(made.inputs, site, 0)
        other.scratch += 4096  # more than there is
        with interrupted_at(step, HostPlanner, PlannerParams) as came:
            planner.plan(made.inputs, other, 0)
        written = [planner.params.get(name) for name, _ in SITE]
        for one in (site, other):
            assert planner._written is not one or written == list(one.numbers)
        if len(planner._scratch):  # else the next plan reserves some
            begin = planner._scratch.ctypes.data
            assert begin <= planner._scratch_at < begin + 16
        if not came:
            break
    assert step > 5


def test_both_languages_have_one_record_and_one_plan() -> None:
    text = (TEMPLATES / "cpu/warploom/host_planner/delivery.hpp").read_text()
    (size,) = re.findall(r"sizeof\(Delivery\) == (\d+) \* 8", text)
    (stages,) = re.findall(r"kStages = (\d+);", text)
    assert (ctypes.sizeof(delivery.Delivery), STAGES) == (8 * int(size), int(stages))
    names = [field[0] for field in delivery.Delivery._fields_]
    found = [re.search(rf"^  [\w:* (]*\b{name}(\)\(|;|\[)", text, re.M) for name in names]
    places = [match.start() if match else -1 for match in found]
    assert min(places) > 0 and places == sorted(places)
    assert tuple(re.findall(r"&Params::(\w+)", text)) == OUTPUTS
