"""Pages of a GPU, by the CUDA driver's virtual memory management.

Pages are handles of `cuMemCreate`, which no address has at first. Mapping one takes `cuMemMap` for
each page and one `cuMemSetAccess` for all that lie side by side, which is the dearest of the calls.
None of them is ordered by streams: what kernels may still read must not be unmapped before an event
behind them has passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from warploom.memory_errors import NoVirtualMemory, PageFailed, ReservationFailed
from warploom.runtime.devices.cuda import load_driver
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.tensors import shortcuts
from warploom.serving.virtual_memory.driver import Addresses
from warploom.tables import in_bytes


class CudaDriver:
    """See `Driver`. Fences are events of the driver."""

    def __init__(self, device: torch.device, page_bytes: int | None) -> None:
        """Use the context that torch has on a device.

        Args:
            device: with its index.
            page_bytes: a multiple of the device's granularity, which it is by default (2 MiB).

        Raises:
            NoCudaCompiler: the package cuda-bindings is missing.
            NoVirtualMemory: the device cannot, or not in pages of this size.
        """
        self._driver = driver = load_driver()
        self._device = device
        self._bare = set[int]()  # addresses without a page, of calls that were refused midway
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current
            self._context = self._call("cuCtxGetCurrent")
        self._check_support()
        kind = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property = driver.CUmemAllocationProp()
        self._property.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = kind
        self._property.location.id = device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = kind
        self._access.location.id = device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.page_bytes = self._checked_size(page_bytes)

    def _check_support(self) -> None:
        name = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
        attribute = getattr(self._driver.CUdevice_attribute, name)
        if not self._call("cuDeviceGetAttribute", attribute, self._device.index):
            reason = "the driver says that the device has none"
            raise NoVirtualMemory(
                device=self._device, reason=reason, remedy="Use a paged cache (Paged)."
            )

    def _checked_size(self, page_bytes: int | None) -> int:
        flags = self._driver.CUmemAllocationGranularity_flags
        least = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._property,
                flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        if page_bytes is not None and page_bytes % least:
            remedy = f"Leave page_bytes out, or give a multiple of {least}."
            reason = f"page_bytes is {page_bytes}, and its pages have {least} bytes"
            raise NoVirtualMemory(device=self._device, reason=reason, remedy=remedy)
        return page_bytes or least

    def reserve(self, size: int) -> int:
        status, address = self._driver.cuMemAddressReserve(size, self.page_bytes, 0, 0)
        if int(status) != 0:
            raise ReservationFailed(size=in_bytes(size), reason=self._reason(status))
        return int(address)

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, page: int) -> int:
        return int(self._call("cuMemCreate", self.page_bytes, self._property, 0))

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        size, mapped = self.page_bytes, 0
        try:
            for handle in handles:
                self._call("cuMemMap", address + mapped * size, size, 0, handle, 0)
                mapped += 1
            self._call("cuMemSetAccess", address, mapped * size, [self._access], 1)
        except PageFailed:
            self._bare.update(address + i * size for i in range(mapped, len(handles)))
            raise

    def unmap(self, address: int, pages: int) -> None:
        # page by page: a range that was mapped by one call cannot be unmapped in part, nor does
        # the driver promise to unmap several at once
        places = range(address, address + pages * self.page_bytes, self.page_bytes)
        for place in places:
            if place not in self._bare:
                self._call("cuMemUnmap", place, self.page_bytes)
                self._bare.add(place)
        self._bare.difference_update(places)

    def fence(self) -> Any:
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with torch.cuda.device(self._device):
            event = self._call("cuEventCreate", flags)
            self._call("cuEventRecord", event, shortcuts.raw_stream(self._device.index))
        return Fence(self._driver, event)

    def wait(self, fence: Fence | None) -> None:
        if fence is not None:
            self._call("cuEventSynchronize", fence.event)

    def follow(self, fence: Fence | None) -> None:
        if fence is not None:
            stream = shortcuts.raw_stream(self._device.index)
            self._call("cuStreamWaitEvent", stream, fence.event, 0)

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def refuse_under_capture(self, what: str) -> None:
        remedy = "Reserve and grow before the capture: addresses stay the same for later replays."
        refuse_under_capture(self._device, what, remedy)

    def enter_thread(self) -> None:
        self._call("cuCtxSetCurrent", self._context)
        # Another thread may capture meanwhile, in a mode that forbids this one to wait for events.
        # No event that is waited for here was recorded under capture.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuThreadExchangeStreamCaptureMode", mode)

    def tensor(self, addresses: Addresses) -> torch.Tensor:
        """See `Driver`.

        torch asks the driver which device an address is of, and the driver knows that of addresses
        with memory alone; so the first one has some for as long as it takes.
        """
        handle = self.create(0)
        try:
            try:
                self.map(addresses.first, [handle])
                return torch.as_tensor(_Exported(addresses), device=self._device)
            finally:
                self.unmap(addresses.first, 1)
        finally:
            self.destroy(handle)

    def close(self) -> None:
        return None

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver; its one result, or None."""
        status, *results = getattr(self._driver, name)(*args)
        if int(status) != 0:
            remedy = "Make a smaller pool if the device has no memory left (nvidia-smi)."
            size = in_bytes(self.page_bytes) if hasattr(self, "page_bytes") else self._device
            raise PageFailed(call=name, size=size, reason=self._reason(status), remedy=remedy)
        return results[0] if results else None

    def _reason(self, status: Any) -> str:
        text = self._driver.cuGetErrorString(status)[1]
        return f"{status.name} ({text.decode() if isinstance(text, bytes) else text})"


class Fence:
    """An event of the driver, which lives as long as this object."""

    def __init__(self, driver: Any, event: Any) -> None:
        self.event = event
        weakref.finalize(self, driver.cuEventDestroy, event).atexit = False


class _Exported:
    """Addresses as torch takes them; it keeps this object for as long as it has tensors of them."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self.__cuda_array_interface__ = {
            "shape": (addresses.size,),
            "typestr": "|u1",
            "data": (addresses.first, False),
            "version": 3,
        }
