"""Pages of a request's cache on their way from the process that prefills to the one that decodes.

The receiver pulls: it alone knows which of its pages are free, and how fast it can take them. A
channel between the two carries offers and answers, and a `Carrier` the pages: NIXL reads memory of
the other process or machine, and where it is not installed the socket carries the bytes itself.

Sender: offer (what the request needs, where its pages lie) -> wait for "taken" -> "over".
Receiver: take an offer -> choose own pages -> carry -> "taken" -> wait for "over".

Every message names its hand-over. "over" tells the receiver that the sender still held the pages
when they were read: one that gave up has freed them, and other values may lie there.

Whatever is lost on the way, a process, the channel or a transfer, ends with TransferLost after
`timeout` seconds of silence at most, on both sides. It ends the channel, too, unless nothing of a
hand-over had come: what was on its way could be taken for part of the next one.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from socket import AF_INET, AF_INET6, IPPROTO_TCP, MSG_PEEK, TCP_NODELAY, socket
from typing import Any, Protocol

import torch

from warploom.errors import ArgumentError, IndexOutOfRange, MissingPackage
from warploom.serving.distributed.errors import TransferLost, checked_timeout

TIMEOUT = 30.0  # seconds
_WANTED, _TAKEN, _OVER = "send", "taken", "over"
_LENGTH = struct.Struct("!Q")
_PAUSE = 20e-6  # seconds between looks at a transfer
_LONGEST = 1 << 26  # bytes of an offer or an answer


class Carrier(Protocol):
    """How pages come from the sender's caches into the receiver's; one of each side."""

    def offered(self, pages: Sequence[int]) -> dict[str, str]:
        """What the receiver must know to get at these pages."""
        ...

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
        told = f"the other side was silent for {self.timeout:g} s" if is_late else str(reason)
        return TransferLost(what=self.what, reason=told)


class _Side:
    """What both processes have: caches, a channel between them, and what carries pages."""

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


class PageSender(_Side):
    """The process that prefills.

    Args:
        caches: paged caches, each [pages, ...] and contiguous, such as k and v of all layers.
        connection: a stream socket to the receiver, whose caches have pages of the same shapes
            and types.
        carrier: how pages travel; `carrier_for(caches)` by default.
        timeout: seconds that the receiver may take.
    """

    def send(self, pages: Sequence[int], request: dict[str, Any]) -> None:
        """Hand the pages of a request over; returns when they are taken, and may be freed.

        The pages must have been written: on a GPU, synchronise the stream first.

        Args:
            pages: the request's pages, in order.
            request: what the receiver needs to go on, such as lengths and the next token: values
                that JSON can hold.

        Raises:
            TransferLost: the receiver ended, was silent, or could not take them. Make a new pair
                over a new connection then, except after "the receiver refused".
            ArgumentError: pages that are not in the caches, or come twice.
        """
        pages = [int(page) for page in pages]
        _check_pages("pages", pages, self._caches)
        channel, own = self._channel, secrets.token_hex(8)
        offer = {
            "id": own, "request": request, "pages": len(pages), "caches": _shapes(self._caches),
            "kind": type(self._carrier).__name__, "where": self._carrier.offered(pages),
        }  # fmt: skip
        message = json.dumps(offer).encode()
        with channel.in_step():
            channel.send(message)
            answer = channel.heard(own)
            if answer == _WANTED:
                self._carrier.give(channel, pages)
                answer = channel.heard(own)
                if answer != _TAKEN:
                    raise channel.lost(answer)
                channel.tell(own, _OVER)
                return
        raise channel.lost(answer)  # refused before a page moved: both are still in step


class PageReceiver(_Side):
    """The process that decodes; arguments as of `PageSender`."""

    def receive(self, free: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        """Take the next request.

        Args:
            free: pages that may be written; the first are used.

        Returns:
            What the sender told of the request, and the pages that hold it, in order.

        Raises:
            TransferLost: no request came in time, and may be asked for again; or the sender ended
                or was silent, or a transfer broke: make a new pair over a new connection then.
            ArgumentError: too few free pages, pages that are not in the caches or come twice, or
                caches of other shapes; the sender is told, and may send again.
        """
        channel = self._channel
        channel.await_next()
        with channel.in_step():
            offer = json.loads(channel.receive())
            own, into = offer["id"], [int(page) for page in free[: offer["pages"]]]
            refused = self._obstacle(offer, into)
            if refused is not None:
                channel.tell(own, f"the receiver refused: {refused}")
            else:
                self._take(own, offer["where"], into)
        if refused is not None:
            raise refused
        return offer["request"], into

    def _take(self, own: str, where: dict[str, str], into: Sequence[int]) -> None:
        channel = self._channel
        channel.tell(own, _WANTED)
        try:
            self._carrier.take(channel, where, into)
        except TransferLost as error:
            with suppress(TransferLost):  # so that the sender need not wait
                channel.tell(own, str(error))
            raise
        channel.tell(own, _TAKEN)
        answer = channel.heard(own)
        if answer != _OVER:
            raise channel.lost(answer)

    def _obstacle(self, offer: dict[str, Any], into: Sequence[int]) -> ArgumentError | None:
        own, kind = _shapes(self._caches), type(self._carrier).__name__
        if offer["caches"] != own:
            reason = f"pages of {offer['caches']} come, and these caches have {own}"
        elif offer["kind"] != kind:
            reason = f"they come by {offer['kind']}, and this side takes {kind}"
        elif len(into) < offer["pages"]:
            reason = f"{offer['pages']} pages come, and {len(into)} are free"
        else:
            try:
                _check_pages("free", into, self._caches)
            except ArgumentError as error:
                return error
            return None
        return ArgumentError(name="free", reason=reason)


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


def _check_pages(name: str, pages: Sequence[int], caches: Sequence[torch.Tensor]) -> None:
    """Each page is in all caches, and is there once; raises ArgumentError."""
    count = min(map(len, caches), default=0)
    for i, page in enumerate(pages):
        if not 0 <= page < count:
            raise IndexOutOfRange(name=name, index=i, value=page, last=count - 1, of="page")
    if len(set(pages)) < len(pages):
        raise ArgumentError(name=name, reason=f"has a page twice, {list(pages)}; give each once")


def _shapes(caches: Sequence[torch.Tensor]) -> list[Any]:
    """Of a page of each cache, as JSON gives them back."""
    return [[list(cache.shape[1:]), str(cache.dtype)] for cache in caches]


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.view(-1).view(torch.uint8)
