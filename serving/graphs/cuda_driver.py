"""Captures of a GPU: CUDA graphs of torch, with one memory pool for all of them."""

from __future__ import annotations

from typing import Any

import torch

from warploom.graph_errors import CaptureFailed, GraphError
from warploom.runtime.devices.graph import pool_capture
from warploom.serving.graphs.driver import Body


class CudaDriver:
    """See `GraphDriver`. Captures are made on a stream of their own, and replayed on any.

    What a capture takes is measured, not computed: torch's reserved memory before and after is what
    the shared pool has grown by, and what else is missing of the device's free memory the driver
    keeps for the graph itself. Another process that allocates meanwhile falls on the graph's bill.
    """

    def __init__(self, device: torch.device) -> None:
        """Of a device with its index."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.current_stream(device)
        self._live, self._shared = 0, 0
        self._handle: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    @property
    def shared_bytes(self) -> int:
        return self._shared

    def rehearse(self, body: Body) -> None:
        # on the stream that captures: libraries have workspaces for each
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                body()
        finally:  # what it enqueued before an error writes to buffers that are used next
            current.wait_stream(self._stream)

    def capture(self, body: Body, what: str) -> CudaCapture:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # so that what is reserved now is in use
        free, reserved = self._memory()
        graph = torch.cuda.CUDAGraph()
        error = self._record(graph, body)
        if error is not None:
            if self._live:  # other captures keep the pool as it is now
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
                self._shared += max(0, self._memory()[1] - reserved)
            if isinstance(error, GraphError):
                raise error
            raise CaptureFailed(what=what, reason=_first_line(error)) from error
        torch.cuda.synchronize(self._device)
        free_now, reserved_now = self._memory()
        grown = max(0, reserved_now - reserved)
        self._shared += grown
        self._live += 1
        return CudaCapture(self, graph, max(0, free - free_now - grown))

    def _record(self, graph: torch.cuda.CUDAGraph, body: Body) -> Exception | None:
        """Let a graph hold the calls of a body; what went wrong first, if anything."""
        first: Exception | None = None
        is_begun = is_ended = False
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                # other threads may allocate and wait meanwhile: what they do is not part of it
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                is_begun = True
                with pool_capture(self._device):
                    body()
            except Exception as error:
                first = error
            finally:
                if is_begun:
                    try:
                        graph.capture_end()
                        is_ended = True
                    except RuntimeError as error:
                        first = first or error
                if not is_ended:
                    self._leave_pool(graph)
        if first is not None:
            graph.reset()
            if self._live == 0:
                self._handle = None  # its pool went with this graph
        return first

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """Do what torch leaves undone where a capture cannot be ended.

        Its allocator would give the pool's memory to later captures and refuse to empty its cache;
        that of pinned memory keeps asking the graph, which must live on.
        """
        self._failed.append(graph)
        torch._C._cuda_endAllocateToPool(self._device.index, self._handle)
        torch._C._cuda_releasePool(self._device.index, self._handle)

    def order(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def closed(self) -> None:
        """A capture is gone. With the last one the shared pool is torch's to free."""
        self._live -= 1
        if self._live == 0:
            self._shared, self._handle = 0, None
            torch.cuda.empty_cache()

    def _memory(self) -> tuple[int, int]:
        """Free bytes of the device, and bytes that torch has reserved."""
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)


class CudaCapture:
    """See `Capture`."""

    def __init__(self, driver: CudaDriver, graph: torch.cuda.CUDAGraph, own_bytes: int) -> None:
        self._driver, self._graph, self.own_bytes = driver, graph, own_bytes
        self._is_open = True

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._graph.reset()
            self._driver.closed()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
