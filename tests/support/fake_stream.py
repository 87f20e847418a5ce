"""A CUDA stream as far as waiting goes, where there is none."""

from __future__ import annotations


class FakeStream:
    """Notes the streams that it waited for."""

    def __init__(self, handle: int, capture: int = 0) -> None:
        self.cuda_stream, self.capture = handle, capture  # the number of its capture; 0 for none
        self.waited: list[int] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.cuda_stream)
