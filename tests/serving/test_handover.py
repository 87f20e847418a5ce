"""Pages arrive as they were; what is lost on the way is an error on both sides, in time."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from support.senders import caches, offer_and_end

from warploom.distributed import PageReceiver, PageSender, TransferLost
from warploom.errors import ArgumentError
from warploom.serving.distributed import handover

SOON = 10.0  # seconds
CARRIER = handover.ChannelCarrier


def has_nixl() -> bool:
    try:
        import_module("nixl._api")
    except ImportError:
        return False
    return True


nixl = pytest.param("NixlCarrier", marks=pytest.mark.skipif(not has_nixl(), reason="needs nixl"))
CARRIERS = pytest.mark.parametrize("carrier", ["ChannelCarrier", nixl])


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for each in pair:
        each.close()


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run a call in a thread; returns a function that waits for what it returned, or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(SOON)
        assert not thread.is_alive(), "hangs"
        return found[0]

    return result


@CARRIERS
def test_pages_arrive_as_they_were(sockets: Any, carrier: str) -> None:
    ours, theirs = caches(6), caches(9, seed=1)
    before = [x.clone() for x in theirs]
    kind = getattr(handover, carrier)
    sender = PageSender(ours, sockets[0], carrier=kind(ours))
    receiver = PageReceiver(theirs, sockets[1], carrier=kind(theirs))
    for pages, free in (([3, 1], [7, 0, 5]), ([4], [2]), ([], [1])):
        told = {"length": 7, "token": 11}
        sent = beside(lambda pages=pages, told=told: sender.send(pages, told))
        request, into = receiver.receive(free)
        assert sent() is None
        assert request == told and into == free[: len(pages)]
        for cache, own, old in zip(ours, theirs, before, strict=True):
            own_bytes, sent_bytes = own.view(torch.uint8), cache.view(torch.uint8)
            assert torch.equal(own_bytes[into], sent_bytes[pages])
            old.view(torch.uint8)[into] = sent_bytes[pages]
            assert torch.equal(own_bytes, old.view(torch.uint8)), "another page was written"


@CARRIERS
def test_a_sender_that_ends_is_an_error(carrier: str) -> None:
    here, there = socket.socketpair()
    context = multiprocessing.get_context("forkserver")
    sender = context.Process(target=offer_and_end, args=(there, carrier))
    sender.start()
    there.close()
    own = caches(6)
    receiver = PageReceiver(own, here, carrier=getattr(handover, carrier)(own), timeout=60)
    begin = time.monotonic()
    with pytest.raises(TransferLost, match="No page of it may be used"):
        receiver.receive([0, 1])
        receiver.receive([0, 1])  # NIXL may have read all in time; nothing more comes
    assert time.monotonic() - begin < 50
    sender.join()
    assert sender.exitcode == 9


def test_a_silent_peer_is_an_error(sockets: Any) -> None:
    own = caches(6)
    for side in (
        lambda: PageReceiver(own, sockets[1], carrier=CARRIER(own), timeout=0.2).receive([0]),
        lambda: PageSender(own, sockets[0], carrier=CARRIER(own), timeout=0.2).send([0], {}),
    ):
        assert "silent for 0.2 s" in str(beside(side)())


def test_a_receiver_that_stops_reading_is_an_error(sockets: Any) -> None:
    own = [torch.zeros(8, 1 << 20)]  # more than a socket buffers
    sender = PageSender(own, sockets[0], carrier=CARRIER(own), timeout=0.3)
    sent = beside(lambda: sender.send(range(8), {}))
    channel = handover.Channel(sockets[1], SOON)
    channel.receive()
    channel.send(b"send")
    assert isinstance(sent(), TransferLost)


def test_a_receiver_that_refuses_tells_the_sender(sockets: Any) -> None:
    ours, other = caches(6), [caches(6)[0]]
    for theirs, free, reason in ((caches(6), [1], "1 are free"), (other, [1, 2], "these caches")):
        carrier = CARRIER(ours)
        sender = PageSender(ours, sockets[0], carrier=carrier)
        sent = beside(lambda sender=sender: sender.send([3, 1], {}))
        receiver = PageReceiver(theirs, sockets[1], carrier=CARRIER(theirs))
        with pytest.raises(ArgumentError, match=reason):
            receiver.receive(free)
        failed = sent()
        assert isinstance(failed, TransferLost) and "the receiver refused" in str(failed)


def test_caches_must_be_contiguous(sockets: Any) -> None:
    with pytest.raises(ArgumentError, match="contiguous"):
        PageSender([torch.zeros(4, 8).t()], sockets[0])
