"""A CUDA stream as far as waiting goes, where there is none."""

from __future__ import annotations


class FakeStream:
    """Notes the streams that it waited for."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waited: list[int] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.cuda_stream)
