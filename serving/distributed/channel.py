"""Messages between the two sides of a hand-over, and when they count as lost."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from socket import AF_INET, AF_INET6, IPPROTO_TCP, MSG_PEEK, TCP_NODELAY, socket
from typing import Any

from warploom.serving.distributed.errors import TransferLost
from warploom.serving.distributed.timeouts import checked_timeout

_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 26  # bytes of an offer or an answer


class Channel:
    """Messages over a stream socket, each after its length; every wait ends.

    Args:
        connection: a connected stream socket, to this machine or another.
        timeout: seconds that the other side may let pass without a byte.
        what: what is handed over, for messages.
    """

    def __init__(self, connection: socket, timeout: float, what: str = "a request") -> None:
        connection.settimeout(checked_timeout(timeout))
        if connection.family in (AF_INET, AF_INET6):  # which would hold back what follows a length
            connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._socket, self.timeout, self.what = connection, timeout, what
        self._is_lost = False

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Both sides speak of one hand-over in the block; if it fails, the channel is closed.

        Raises:
            TransferLost: an earlier hand-over failed.
        """
        if self._is_lost:
            reason = "the channel ended with an earlier failure; make a new pair over a new one"
            raise self.lost(reason)
        try:
            yield
        except BaseException:
            self._is_lost = True
            self._socket.close()
            raise

    def tell(self, hand_over: str, word: str) -> None:
        """Send a word of a hand-over; raises TransferLost."""
        self.send(json.dumps([hand_over, word]).encode())

    def heard(self, hand_over: str) -> str:
        """The next word; raises TransferLost if it is of another hand-over, or none comes."""
        message = self.receive()
        try:
            of, word = json.loads(message)
        except (TypeError, ValueError) as error:
            raise self.lost("what came is no answer") from error
        if of != hand_over:
            raise self.lost("an answer to another hand-over came")
        return str(word)

    def send(self, message: Any) -> None:
        """Send bytes; raises TransferLost."""
        rest = memoryview(message).cast("B")
        try:
            self._socket.sendall(_LENGTH.pack(rest.nbytes))
            while rest.nbytes:  # `sendall` has one timeout for all of it
                rest = rest[self._socket.send(rest) :]
        except OSError as error:
            raise self.lost(error) from error

    def await_next(self) -> None:
        """Wait for a message; raises TransferLost if none comes in time, and a later one may."""
        try:
            if not self._is_lost:
                self._socket.recv(1, MSG_PEEK)
        except OSError as error:
            raise self.lost(error) from error

    def receive(self, into: memoryview | None = None) -> bytes:
        """The next message; raises TransferLost if none comes in time.

        Args:
            into: memory of the size that the message must have, in place of a result.
        """
        (length,) = _LENGTH.unpack(self._filled(memoryview(bytearray(_LENGTH.size))))
        if into is None:
            if length > _LONGEST:
                raise self.lost(f"a message of {length} bytes came")
            return bytes(self._filled(memoryview(bytearray(length))))
        if length != into.nbytes:
            raise self.lost(f"{length} bytes came for a page of {into.nbytes}")
        self._filled(into)
        return b""

    def _filled(self, memory: memoryview) -> memoryview:
        at = 0
        while at < len(memory):
            try:
                count = self._socket.recv_into(memory[at:])
            except OSError as error:
                raise self.lost(error) from error
            if not count:
                raise self.lost("the other side has closed the channel")
            at += count
        return memory

    def lost(self, reason: object) -> TransferLost:
        """The error for a failure of this kind."""
        is_late = isinstance(reason, TimeoutError)
        cause = f"the other side was silent for {self.timeout:g} s" if is_late else str(reason)
        return TransferLost(what=self.what, reason=cause)
