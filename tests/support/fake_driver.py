"""The CUDA driver's virtual memory as bookkeeping, with its rules: it refuses what a device would.

Types and enums are those of cuda.bindings, so that what is passed has their names and fields. Of
time it knows one thing: an event has passed once the host has waited for it, or for one behind it,
and before that what a test says to be read (`read`) when it is recorded must keep its pages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.serving.virtual_memory import cuda_driver

PAGE = 2 << 20


class FakeDriver:
    """Attributes that tests set: `fail(name)` says which calls are refused, `read` what is read,
    and `stream` which is the current one."""

    def __init__(self, pages: int = 10**6) -> None:
        self._types = pytest.importorskip("cuda.bindings.driver")
        self.pages, self.calls = pages, []
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # address -> handle
        self.accessible: set[int] = set()
        self.read: set[int] = set()  # what kernels read that are on their way
        self.pending: dict[int, set[int]] = {}  # event -> what kernels before it read
        self.stream = 7
        self.passed: dict[int, set[int]] = {}  # event -> those that have passed when it has
        self.awaited: dict[int, set[int]] = {}  # stream -> those that passed before what comes next
        self.fail: Callable[[str], bool] = lambda name: False
        self._next, self._top = 1, 1 << 40  # handle or event, and address

    def __getattr__(self, name: str) -> Any:
        method = self.__dict__.get(f"_{name}") or getattr(type(self), f"_{name}", None)
        if not name.startswith("cu") or method is None:
            return getattr(self._types, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            result = self._types.CUresult
            if self.fail(name):
                return result.CUDA_ERROR_OUT_OF_MEMORY, 0
            return result.CUDA_SUCCESS, method(self, *args)

        return call

    def _cuGetErrorString(self, status: Any) -> bytes:
        return b"out of memory"

    def _cuCtxGetCurrent(self) -> int:
        return 77

    def _cuCtxSetCurrent(self, context: int) -> None:
        assert context == 77

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        assert mode == self._types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        assert attribute.name == "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
        return 1

    def _cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._check(prop)
        return PAGE

    def _check(self, prop: Any) -> None:
        kind = self._types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert prop.type == self._types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert (prop.location.type, prop.location.id) == (kind, 0)

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert size % PAGE == 0 and (alignment, address, flags) == (PAGE, 0, 0)
        self._top, found = self._top + size + PAGE, self._top
        self.reserved[found] = size
        return found

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped)

    def _cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        assert (size, flags) == (PAGE, 0) and len(self.handles) < self.pages
        self._check(prop)
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def _cuMemRelease(self, handle: int) -> None:
        self.handles.remove(handle)
        assert handle not in self.mapped.values()

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (size, offset, flags) == (PAGE, 0, 0) and handle in self.handles
        assert any(first <= address < first + n for first, n in self.reserved.items())
        assert address % PAGE == 0 and address not in self.mapped, "there is a page"
        assert handle not in self.mapped.values(), "the page has another address"
        self.mapped[address] = handle

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        flags = self._types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        assert count == len(access) == 1 and access[0].flags == flags
        assert access[0].location.id == 0
        places = set(range(address, address + size, PAGE))
        assert places <= self.mapped.keys()
        self.accessible |= places

    def _cuMemUnmap(self, address: int, size: int) -> None:
        assert size == PAGE
        for event, pages in self.pending.items():
            assert address not in pages, f"kernels before event {event} may read it"
        del self.mapped[address]
        self.accessible.discard(address)

    def _cuEventCreate(self, flags: int) -> int:
        self._next += 1
        return self._next

    def _cuEventRecord(self, event: int, stream: int) -> None:
        assert stream == self.stream
        self.pending[event] = set(self.read)
        self.awaited[stream] = self.awaited.get(stream, set()) | {event}
        self.passed[event] = self.awaited[stream]

    def _cuEventSynchronize(self, event: int) -> None:
        for earlier in self.passed[event]:
            self.pending.pop(earlier, None)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        assert (stream, flags) == (self.stream, 0)
        self.awaited[stream] = self.awaited.get(stream, set()) | self.passed[event]

    def _cuEventDestroy(self, event: int) -> None:
        del self.passed[event]  # kernels before it go on


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Let `CudaDriver` use it, with a device that torch does not have."""
    stream = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.pending.clear())
    monkeypatch.setattr(cuda_driver.shortcuts, "raw_stream", lambda index: driver.stream)
    monkeypatch.setattr(cuda_driver, "refuse_under_capture", lambda *args: None)
    as_tensor = torch.as_tensor

    def exported(value: Any, device: Any = None) -> torch.Tensor:
        """torch asks of which device the first address is; it must have memory by then."""
        if isinstance(value, cuda_driver._Exported):
            interface = value.__cuda_array_interface__
            assert interface["data"][0] in driver.accessible and interface["typestr"] == "|u1"
            made = torch.empty(interface["shape"], dtype=torch.uint8, device="meta")
            made._keeps = value  # type: ignore[attr-defined]
            return made
        return as_tensor(value, device=device)

    monkeypatch.setattr(torch, "as_tensor", exported)
