"""Captures of the host: the twin of CUDA graphs, by which all of a pool is tested without a GPU.

It is there to find mistakes, and saves no time: a replay makes the recorded calls again, one by
one, on the tensors of the capture. Captures do not really share memory; instead a replay writes
nonsense over the intermediate results of the one before, which is the worst that sharing can do.
"""

from __future__ import annotations

import torch

from warploom.graph_errors import CaptureFailed, CaptureGone, GraphError
from warploom.runtime.devices.graph import pool_capture
from warploom.serving.graphs.driver import Body
from warploom.serving.graphs.recording import ReadingRefused, Recording

# stands for what a device keeps of each node of a graph, so that budgets have something to bound
_NODE_BYTES = 1024
_HOST = torch.device("cpu")


class HostDriver:
    """See `GraphDriver`."""

    def __init__(self) -> None:
        self._live: set[HostCapture] = set()
        self._last: HostCapture | None = None  # whose results lie in the shared memory
        self._shared = 0

    @property
    def shared_bytes(self) -> int:
        return self._shared

    def rehearse(self, body: Body) -> None:
        body()

    def capture(self, body: Body, what: str) -> HostCapture:
        recording = Recording(what)
        try:
            with torch.no_grad(), pool_capture(_HOST), ReadingRefused(what), recording:
                body()
        except GraphError:
            raise
        except Exception as error:
            raise CaptureFailed(what=what, reason=f"{type(error).__name__}: {error}") from error
        capture = HostCapture(self, recording, what)
        recording.spoil()  # a capture computes nothing
        self._live.add(capture)
        self._shared = max(self._shared, sum(x.numel() * x.itemsize for x in recording.made))
        return capture

    def replay(self, capture: HostCapture, recording: Recording) -> None:
        """Let a capture have the shared memory, and make its calls."""
        if self._last is not None and self._last is not capture:
            self._last.recording.spoil()
        self._last = capture
        recording.replay()

    def closed(self, capture: HostCapture) -> None:
        """A capture is gone."""
        capture.recording.spoil()
        self._live.discard(capture)
        if self._last is capture:
            self._last = None
        if not self._live:
            self._shared = 0

    def order(self) -> None:
        return None

    def drain(self) -> None:
        return None


class HostCapture:
    """See `Capture`."""

    def __init__(self, driver: HostDriver, recording: Recording, what: str) -> None:
        self._driver, self.recording, self._what = driver, recording, what
        self.own_bytes = _NODE_BYTES * len(recording.calls)
        self._is_open = True

    def replay(self) -> None:
        if not self._is_open:
            reason = "it was evicted or closed"
            raise CaptureGone(what=self._what, reason=reason, remedy="This is a bug of warploom.")
        self._driver.replay(self, self.recording)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._driver.closed(self)
