"""What a device must offer to virtual caches, and addresses that live as long as their tensors."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from warploom.memory_errors import ReservationFailed
from warploom.tables import in_bytes


class Driver(Protocol):
    """Addresses, pages, and pages at addresses. The calls of one driver follow one another.

    What the driver refuses is an error of `warploom.memory_errors`, and has changed nothing; but
    `map` and `unmap` may have come to the middle. Either is followed by `unmap` with the same
    address and as many pages, as often as it is refused, before anything else is mapped there.

    Attributes:
        page_bytes: size of a page.
    """

    page_bytes: int

    def reserve(self, size: int) -> int:
        """Addresses without memory; raises ReservationFailed."""
        ...

    def free(self, address: int, size: int) -> None:
        """Give addresses back, at none of which there is a page."""

    def create(self, page: int) -> int:
        """Memory of a page; returns the handle to map it by. Raises PageFailed."""
        ...

    def destroy(self, handle: int) -> None:
        """Give the memory of a page back, which is mapped nowhere."""

    def map(self, address: int, handles: Sequence[int]) -> None:
        """Put pages at addresses one behind the other, where there are none. Raises PageFailed."""

    def unmap(self, address: int, pages: int) -> None:
        """Take pages away from addresses, where there are as many. Raises PageFailed."""

    def fence(self) -> Any:
        """What tells when the current stream has come past all that it was given so far."""

    def wait(self, fence: Any) -> None:
        """Let the host wait for a fence; None has passed."""

    def follow(self, fence: Any) -> None:
        """Let the current stream wait for a fence."""

    def drain(self) -> None:
        """Let the host wait for all work of the device."""

    def refuse_under_capture(self, what: str) -> None:
        """Raise ForbiddenUnderCapture if the current stream is being captured."""

    def enter_thread(self) -> None:
        """Prepare a thread that will call `map` and `unmap`."""

    def tensor(self, addresses: Addresses) -> torch.Tensor:
        """All of the addresses as one uint8 tensor, which keeps them reserved."""
        ...

    def close(self) -> None:
        """Give all that is left back."""


class Addresses:
    """A range of addresses. It is given back when nobody holds it any longer, tensors included.

    Attributes:
        first: the lowest address.
        size: bytes.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        """Reserve them; raises ReservationFailed."""
        if size > sys.maxsize:  # which C would cut off without a word
            raise ReservationFailed(size=in_bytes(size), reason="there are 63 bits")
        self.first, self.size = driver.reserve(size), size
        done = weakref.finalize(self, _free, driver, self.first, size, os.getpid())
        done.atexit = False  # the end of the process does it


def _free(driver: Driver, address: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process gives back nothing of its parent's
        driver.free(address, size)
