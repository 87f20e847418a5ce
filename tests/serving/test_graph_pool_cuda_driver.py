"""The driver of CUDA graphs against a stand-in for torch: what it measures, and failed captures."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.graph_errors import CaptureFailed, OutputsChanged
from warploom.runtime.devices.graph import pool_captures
from warploom.serving.graphs import cuda_driver
from warploom.serving.graphs.cuda_driver import CudaDriver


class Device:
    """What torch would say of a device, and what it was asked for."""

    def __init__(self) -> None:
        self.free, self.reserved, self.handles = 1000, 0, 0
        self.left: list[tuple[str, int, Any]] = []
        self.is_invalid = False
        self.resets = 0
        self.waits: list[tuple[str, str]] = []

    def handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles

    def take(self, reserved: int, own: int) -> None:
        self.reserved += reserved
        self.free -= reserved + own


class Stream:
    def __init__(self, name: str, device: Device) -> None:
        self._name, self._device = name, device

    def wait_stream(self, other: Stream) -> None:
        self._device.waits.append((self._name, other._name))


class Graph:
    def __init__(self, device: Device) -> None:
        self._device = device

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool == (0, self._device.handles) and capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        if self._device.is_invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    def reset(self) -> None:
        self._device.resets += 1

    def replay(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    cuda = SimpleNamespace(
        CUDAGraph=lambda: Graph(made), Stream=lambda _: Stream("side", made),
        current_stream=lambda _: Stream("main", made),
        graph_pool_handle=made.handle, synchronize=lambda _: None, empty_cache=lambda: None,
        mem_get_info=lambda _: (made.free, 1000), memory_reserved=lambda _: made.reserved,
        device=nullcontext, stream=nullcontext,
    )  # fmt: skip
    private = SimpleNamespace(
        _cuda_endAllocateToPool=lambda *given: made.left.append(("end", *given)),
        _cuda_releasePool=lambda *given: made.left.append(("release", *given)),
    )
    monkeypatch.setattr(cuda_driver, "torch", SimpleNamespace(cuda=cuda, _C=private))
    return made


@pytest.fixture
def driver(device: Device) -> CudaDriver:
    return CudaDriver(torch.device("cuda", 2))


def test_memory_is_what_is_missing(device: Device, driver: CudaDriver) -> None:
    first = driver.capture(lambda: device.take(300, 20), "first")
    second = driver.capture(lambda: device.take(0, 30), "second")
    assert (first.own_bytes, second.own_bytes, driver.shared_bytes) == (20, 30, 300)
    first.close()
    first.close()
    assert driver.shared_bytes == 300 and device.resets == 1
    second.close()
    assert driver.shared_bytes == 0  # torch gives the pool back with its last graph
    driver.capture(lambda: None, "third")
    assert device.handles == 2


def test_a_capture_that_cannot_be_ended_is_taken_out_of_the_allocator(
    device: Device, driver: CudaDriver
) -> None:
    kept = driver.capture(lambda: device.take(10, 1), "kept")

    def synchronizes() -> None:
        device.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(CaptureFailed, match="this could not be captured: RuntimeError: operation"):
        driver.capture(synchronizes, "this")
    assert device.left == [("end", 2, (0, 1)), ("release", 2, (0, 1))]
    device.is_invalid = False
    driver.capture(lambda: None, "other")
    assert device.handles == 1  # the pool of `kept` still serves
    kept.close()


@pytest.mark.parametrize("error", [ValueError("no layer"), OutputsChanged(got="a", before="b")])
def test_errors_of_a_body_end_its_capture(
    error: Exception, device: Device, driver: CudaDriver
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error) if isinstance(error, OutputsChanged) else CaptureFailed) as told:
        driver.capture(fails, "this")
    assert told.value is error or told.value.__cause__ is error
    assert device.left == [] and device.resets == 1 and driver.shared_bytes == 0
    driver.capture(lambda: None, "next")
    assert device.handles == 2


def test_a_capture_that_is_invalid_at_its_end_fails(device: Device, driver: CudaDriver) -> None:
    def spoils() -> None:
        device.is_invalid = True

    with pytest.raises(CaptureFailed, match="previous error"):
        driver.capture(spoils, "this")
    assert [call for call, *_ in device.left] == ["end", "release"]


def test_what_a_body_calls_can_tell_that_a_pool_captures(driver: CudaDriver) -> None:
    seen: list[bool] = []
    driver.capture(lambda: seen.append(pool_captures.is_on), "this")
    assert seen == [True] and not pool_captures.is_on
    with pytest.raises(CaptureFailed):
        driver.capture(lambda: seen[5], "this")  # type: ignore[arg-type]
    assert not pool_captures.is_on


def test_memory_of_a_failed_capture_counts_where_others_keep_the_pool(
    device: Device, driver: CudaDriver
) -> None:
    def fails() -> None:
        device.take(400, 0)
        raise RuntimeError("CUDA out of memory")

    kept = driver.capture(lambda: device.take(100, 1), "kept")
    with pytest.raises(CaptureFailed):
        driver.capture(fails, "large")
    assert driver.shared_bytes == 500
    kept.close()
    with pytest.raises(CaptureFailed):
        driver.capture(fails, "large")
    assert driver.shared_bytes == 0  # its pool went with it


def test_streams_are_in_order_after_a_rehearsal_that_raises(
    device: Device, driver: CudaDriver
) -> None:
    with pytest.raises(ZeroDivisionError):
        driver.rehearse(lambda: 1 // 0)  # type: ignore[arg-type]
    assert device.waits == [("side", "main"), ("main", "side")]
