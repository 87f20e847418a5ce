"""Pages of a request's cache on their way from the process that prefills to the one that decodes.

The receiver pulls: it alone knows which of its pages are free, and how fast it can take them. A
channel between the two carries offers and answers, and a `Carrier` the pages: NIXL reads memory of
the other process or machine, and where it is not installed the socket carries the bytes itself.

Sender: offer (what the request needs, where its pages lie) -> wait for "taken".
Receiver: take an offer -> choose own pages -> carry -> "taken".

Whatever is lost on the way, a process, the channel or a transfer, ends with TransferLost after
`timeout` seconds at most, on both sides.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from socket import socket
from typing import Any, Protocol

import torch

from warploom.errors import ArgumentError, MissingPackage
from warploom.serving.distributed.errors import TransferLost

TIMEOUT = 30.0  # seconds
_TAKEN, _WANTED = b"taken", b"send"
_LENGTH = struct.Struct("!Q")
_PAUSE = 20e-6  # seconds between looks at a transfer
_LONGEST = 1 << 26  # bytes of an offer or an answer


class Carrier(Protocol):
    """How pages come from the sender's caches into the receiver's; one of each side."""

    def offered(self, pages: Sequence[int]) -> dict[str, str]:
        """What the receiver must know to get at these pages."""

    def give(self, channel: Channel, pages: Sequence[int]) -> None:
        """The sender's part, once the receiver wants the pages."""

    def take(self, channel: Channel, offer: dict[str, str], into: Sequence[int]) -> None:
        """The receiver's part: fill own pages, in the order of the offer's."""


class Channel:
    """Messages over a stream socket, each after its length; every wait ends.

    Args:
        connection: a connected stream socket, to this machine or another.
        timeout: seconds that the other side may let pass without a byte.
        what: what is handed over, for messages.
    """

    def __init__(self, connection: socket, timeout: float, what: str = "a request") -> None:
        connection.settimeout(timeout)
        self._socket, self.timeout, self.what = connection, timeout, what

    def send(self, message: Any) -> None:
        """Send bytes; raises TransferLost."""
        try:
            self._socket.sendall(_LENGTH.pack(memoryview(message).nbytes))
            self._socket.sendall(message)
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
        told = f"the other side was silent for {self.timeout:g} s" if is_late else str(reason)
        return TransferLost(what=self.what, reason=told)


class PageSender:
    """The process that prefills.

    Args:
        caches: paged caches, each [pages, ...] and contiguous, such as k and v of all layers.
        connection: a stream socket to the receiver, whose caches have pages of the same shapes
            and types.
        carrier: how pages travel; `carrier_for(caches)` by default.
        timeout: seconds that the receiver may take.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        connection: socket,
        *,
        carrier: Carrier | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._caches = checked_caches(caches)
        self._channel = Channel(connection, timeout)
        self._carrier = carrier_for(caches) if carrier is None else carrier

    def send(self, pages: Sequence[int], request: dict[str, Any]) -> None:
        """Hand the pages of a request over; returns when they are taken, and may be freed.

        The pages must have been written: on a GPU, synchronise the stream first.

        Args:
            pages: the request's pages, in order.
            request: what the receiver needs to go on, such as lengths and the next token: values
                that JSON can hold.

        Raises:
            TransferLost: the receiver ended, was silent, or could not take them.
        """
        pages = [int(page) for page in pages]
        offer = {
            "request": request, "pages": len(pages), "kind": type(self._carrier).__name__,
            "caches": _shapes(self._caches), "where": self._carrier.offered(pages),
        }  # fmt: skip
        self._channel.send(json.dumps(offer).encode())
        answer = self._channel.receive()
        if answer == _WANTED:
            self._carrier.give(self._channel, pages)
            answer = self._channel.receive()
        if answer != _TAKEN:
            raise self._channel.lost(answer.decode(errors="replace"))


class PageReceiver:
    """The process that decodes; arguments as of `PageSender`."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        connection: socket,
        *,
        carrier: Carrier | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._caches = checked_caches(caches)
        self._channel = Channel(connection, timeout)
        self._carrier = carrier_for(caches) if carrier is None else carrier

    def receive(self, free: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        """Take the next request.

        Args:
            free: pages that may be written; the first are used.

        Returns:
            What the sender told of the request, and the pages that hold it, in order.

        Raises:
            TransferLost: the sender ended or was silent, or a transfer broke.
            ArgumentError: too few free pages, or caches of other shapes; the sender is told.
        """
        offer = json.loads(self._channel.receive())
        into = [int(page) for page in free[: offer["pages"]]]
        reason = self._obstacle(offer, len(into))
        if reason is not None:
            self._channel.send(f"the receiver refused: {reason}".encode())
            raise ArgumentError(name="free", reason=reason)
        self._channel.send(_WANTED)
        try:
            self._carrier.take(self._channel, offer["where"], into)
        except TransferLost as error:
            with suppress(TransferLost):  # so that the sender need not wait
                self._channel.send(str(error).encode())
            raise
        self._channel.send(_TAKEN)
        return offer["request"], into

    def _obstacle(self, offer: dict[str, Any], free: int) -> str | None:
        own, kind = _shapes(self._caches), type(self._carrier).__name__
        if offer["caches"] != own:
            return f"pages of {offer['caches']} come, and these caches have {own}"
        if offer["kind"] != kind:
            return f"they come by {offer['kind']}, and this side takes {kind}"
        return (
            f"{offer['pages']} pages come, and {free} are free" if free < offer["pages"] else None
        )


class ChannelCarrier:
    """Pages through the channel itself: no library, and a copy on each side."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = caches

    def offered(self, pages: Sequence[int]) -> dict[str, str]:
        return {}

    def give(self, channel: Channel, pages: Sequence[int]) -> None:
        for cache in self._caches:
            for page in pages:
                channel.send(_bytes_of(cache[page]).cpu().numpy())

    def take(self, channel: Channel, offer: dict[str, str], into: Sequence[int]) -> None:
        for cache in self._caches:
            for page in into:
                own = _bytes_of(cache[page])
                arrived = own if own.device.type == "cpu" else torch.empty_like(own, device="cpu")
                channel.receive(arrived.numpy().data)
                own.copy_(arrived)


class NixlCarrier:
    """Pages by NIXL: the receiver reads the sender's memory, DRAM or that of a GPU.

    Args:
        caches: registered for as long as this object lives.
        name: of the agent; two that talk need different ones.

    Raises:
        MissingPackage: of `nixl`, or its half for the CUDA packages that are installed.
    """

    def __init__(self, caches: Sequence[torch.Tensor], name: str | None = None) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]
        except ImportError as error:
            raise MissingPackage(
                what="NixlCarrier", package="nixl", requirement="nixl>=1.5"
            ) from error
        name = f"warploom-{time.time_ns()}" if name is None else name
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._caches = list(caches)
        self._registered = self._agent.register_memory(self._caches)

    def _places(self, pages: Sequence[int]) -> Any:
        return self._agent.get_xfer_descs([cache[page] for cache in self._caches for page in pages])

    def offered(self, pages: Sequence[int]) -> dict[str, str]:
        places = self._agent.get_serialized_descs(self._places(pages)) if pages else b""
        told = {"agent": self._agent.get_agent_metadata(), "places": places}
        return {name: base64.b64encode(value).decode() for name, value in told.items()}

    def give(self, channel: Channel, pages: Sequence[int]) -> None:
        pass  # the receiver reads

    def take(self, channel: Channel, offer: dict[str, str], into: Sequence[int]) -> None:
        if not into:
            return
        told = {name: base64.b64decode(value) for name, value in offer.items()}
        try:
            peer = self._agent.add_remote_agent(told["agent"])
            there = self._agent.deserialize_descs(told["places"])
            transfer = self._agent.initialize_xfer("READ", self._places(into), there, peer)
            try:
                self._wait(transfer, channel)
            finally:  # which ends one that is still under way
                self._agent.release_xfer_handle(transfer)
        except TransferLost:
            raise
        except Exception as error:  # those of NIXL have no class in common
            raise channel.lost(f"NIXL: {error}") from error

    def _wait(self, transfer: Any, channel: Channel) -> None:
        state, deadline = self._agent.transfer(transfer), time.monotonic() + channel.timeout
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            late = f"NIXL had not finished after {channel.timeout:g} s"
            raise channel.lost(late if state == "PROC" else "NIXL reports an error")


def carrier_for(caches: Sequence[torch.Tensor]) -> Carrier:
    """NIXL where it is installed, else the channel. Both sides must have the same."""
    try:
        return NixlCarrier(caches)
    except MissingPackage:
        return ChannelCarrier(caches)


def checked_caches(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The caches; raises ArgumentError for one whose pages are not contiguous."""
    for i, cache in enumerate(caches):
        if cache.dim() < 2 or not cache.is_contiguous():
            reason = "must be contiguous, [pages, ...], since pages are moved as bytes"
            raise ArgumentError(name=f"caches[{i}]", reason=reason)
    return list(caches)


def _shapes(caches: Sequence[torch.Tensor]) -> list[Any]:
    """Of a page of each cache, as JSON gives them back."""
    return [[list(cache.shape[1:]), str(cache.dtype)] for cache in caches]


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.view(-1).view(torch.uint8)
