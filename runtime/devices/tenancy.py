"""Workspaces in the caller's memory: whose plan lies there, and who waits for whom."""

from __future__ import annotations

from warploom import forks
from warploom.runtime.devices.streams import Streams


class Tenancy:
    """The bytes of the caller's memory that one workspace uses.

    It outlasts the workspace, since kernels that were enqueued may: until another one takes all of
    its bytes, and so stands behind them.

    Attributes:
        is_held: the plan that lies there is this workspace's.
    """

    def __init__(self, begin: int, streams: Streams | None) -> None:
        """Take note of who will use memory from an address on."""
        self._begin = begin
        self._streams = streams
        self._used = 0  # bytes of the layout
        self._most = 0  # of the largest so far, which kernels may still use
        self._is_left = False
        self.is_held = False

    def leave(self) -> None:
        """The workspace is gone."""
        self._is_left = True

    def take(self, used: int) -> None:
        """Hold so many bytes: wait for all who used some, and let none keep a plan there."""
        with _lock:
            if self not in _tenancies:
                _tenancies.append(self)
            self._used, self._most = used, max(self._most, used)
            for other in [x for x in _tenancies if x is not self and self._meets(x, x._most)]:
                if self._streams is not None and other._streams is not None:
                    self._streams.follow(other._streams)
                if self._meets(other, other._used):
                    other.is_held = False
                if other._is_left and self._covers(other):
                    _tenancies.remove(other)
            self.is_held = True

    def _meets(self, other: Tenancy, its_bytes: int) -> bool:
        """True if this layout has bytes in common with another's first ones."""
        return self._begin < other._begin + its_bytes and other._begin < self._begin + self._used

    def _covers(self, other: Tenancy) -> bool:
        return (
            self._begin <= other._begin and other._begin + other._most <= self._begin + self._used
        )


_tenancies: list[Tenancy] = []
_lock = forks.lock()
