"""What a device must offer to a graph pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Body = Callable[[], None]


class Capture(Protocol):
    """Calls that were recorded once and can be made again, at the same addresses.

    Attributes:
        own_bytes: memory that goes back to the device with it.
    """

    own_bytes: int

    def replay(self) -> None:
        """Enqueue all of the calls on the current stream, by one launch."""

    def close(self) -> None:
        """Give it up. Nothing of it may be on its way (`GraphDriver.drain`)."""


class GraphDriver(Protocol):
    """Captures whose intermediate results share memory. The calls follow one another."""

    @property
    def shared_bytes(self) -> int:
        """Memory that all captures share; it goes back when the last of them is closed."""
        ...

    def rehearse(self, body: Body) -> None:
        """Run what will be captured once, so that all that is lazy has happened."""

    def capture(self, body: Body, what: str) -> Capture:
        """Record the calls of a body, which has been rehearsed.

        Memory that it allocates is the captures' own: any later replay, of any of them, may write
        there. What shall last is copied, within the body, to memory that was there before.

        Raises:
            CaptureFailed: naming `what`; nothing is left of it.
            GraphError: what the body raises of these, as it is.
        """
        ...

    def order(self) -> None:
        """Let the current stream wait for the calls before this one, if these were on another."""

    def drain(self) -> None:
        """Let the host wait for all replays."""
