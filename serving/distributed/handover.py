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

import secrets
from collections.abc import Sequence
from contextlib import suppress
from socket import socket
from typing import Any

import torch

from warploom.errors import ArgumentError, IndexOutOfRange
from warploom.serving.distributed.carriers import Carrier, carrier_for
from warploom.serving.distributed.channel import Channel
from warploom.serving.distributed.errors import TransferLost
from warploom.serving.distributed.offers import Offer

TIMEOUT = 30.0  # seconds
_WANTED, _TAKEN, _OVER = "send", "taken", "over"


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
        kind, where = type(self._carrier).__name__, self._carrier.offered(pages)
        offer = Offer(own, request, len(pages), _shapes(self._caches), kind, where)
        message = offer.packed()
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
            try:
                offer = Offer.unpacked(channel.receive())
            except ValueError as error:
                raise channel.lost(f"what came is no offer: {error}") from error
            own, into = offer.id, [int(page) for page in free[: offer.pages]]
            refused = self._obstacle(offer, into)
            if refused is not None:
                channel.tell(own, f"the receiver refused: {refused}")
            else:
                self._take(own, offer.where, into)
        if refused is not None:
            raise refused
        return offer.request, into

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

    def _obstacle(self, offer: Offer, into: Sequence[int]) -> ArgumentError | None:
        own, kind = _shapes(self._caches), type(self._carrier).__name__
        if offer.caches != own:
            reason = f"pages of {offer.caches} come, and these caches have {own}"
        elif offer.kind != kind:
            reason = f"they come by {offer.kind}, and this side takes {kind}"
        elif len(into) < offer.pages:
            reason = f"{offer.pages} pages come, and {len(into)} are free"
        else:
            try:
                _check_pages("free", into, self._caches)
            except ArgumentError as error:
                return error
            return None
        return ArgumentError(name="free", reason=reason)


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
