"""A CUDA stream as far as waiting goes, where there is none."""

from __future__ import annotations


class FakeStream:
    """Notes the streams that it waited for."""

    def __init__(self, handle: int, is_captured: bool = False) -> None:
        self.cuda_stream, self.is_captured = handle, is_captured
        self.waited: list[int] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.cuda_stream)
