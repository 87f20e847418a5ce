"""Captures of a GPU: CUDA graphs of torch, with one memory pool for all of them."""

from __future__ import annotations

from typing import Any

import torch

from warploom.graph_errors import CaptureFailed, GraphError
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

    @property
    def shared_bytes(self) -> int:
        return self._shared

    def rehearse(self, body: Body) -> None:
        # on the stream that captures: libraries have workspaces for each
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)

    def capture(self, body: Body, what: str) -> CudaCapture:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as torch does before a capture, so that both sums are alike
        free, reserved = self._memory()
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate and wait meanwhile: what they do is not part of it
        capturing = torch.cuda.graph(
            graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with torch.cuda.device(self._device), capturing:
                body()
        except Exception as error:
            if self._live == 0:
                self._handle = None  # its pool went with the graph that failed
            raised = _first(error)
            if isinstance(raised, GraphError):
                raise raised from None
            raise CaptureFailed(what=what, reason=_first_line(raised)) from error
        torch.cuda.synchronize(self._device)
        free_now, reserved_now = self._memory()
        grown = max(0, reserved_now - reserved)
        self._shared += grown
        self._live += 1
        return CudaCapture(self, graph, max(0, free - free_now - grown))

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


def _first(error: BaseException) -> BaseException:
    """What began a chain of errors: ending an invalid capture raises one of its own, last."""
    while error.__context__ is not None and not isinstance(error, GraphError):
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
