"""Pages arrive as they were; what is lost on the way is an error on both sides, in time."""

from __future__ import annotations

import json
import multiprocessing
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.senders import caches, offer_and_end

import warploom as wl
from warploom import distributed
from warploom.distributed import PageReceiver, PageSender, TransferLost
from warploom.errors import ArgumentError
from warploom.serving.distributed import carriers
from warploom.serving.distributed.channel import Channel

ROOT = Path(__file__).parents[2]
SOON = 10.0  # seconds
CARRIER = carriers.ChannelCarrier


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
    kind = getattr(carriers, carrier)
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
    receiver = PageReceiver(own, here, carrier=getattr(carriers, carrier)(own), timeout=60)
    begin = time.monotonic()
    with pytest.raises(TransferLost, match="No page of it may be used"):
        receiver.receive([0, 1])
        receiver.receive([0, 1])  # NIXL may have read all in time; nothing more comes
    assert time.monotonic() - begin < 50
    sender.join()
    assert sender.exitcode == 9


def test_a_silent_receiver_is_an_error_for_good(sockets: Any) -> None:
    own = caches(6)
    sender = PageSender(own, sockets[0], carrier=CARRIER(own), timeout=0.2)
    assert "silent for 0.2 s" in str(beside(lambda: sender.send([0], {}))())
    for _ in range(2):
        failed = beside(lambda: sender.send([0], {}))()
        assert isinstance(failed, TransferLost) and "make a new pair" in str(failed)


def test_between_two_requests_a_sender_may_be_silent(sockets: Any) -> None:
    """Nobody can wait for ever, and nothing is lost while nothing has come."""
    ours, theirs = caches(6), caches(6)
    sender = PageSender(ours, sockets[0], carrier=CARRIER(ours))
    receiver = PageReceiver(theirs, sockets[1], carrier=CARRIER(theirs), timeout=0.2)
    for page in (1, 4):
        assert "silent for 0.2 s" in str(beside(lambda: receiver.receive([0]))())
        sent = beside(lambda page=page: sender.send([page], {"page": page}))
        assert receiver.receive([page]) == ({"page": page}, [page])
        assert sent() is None


def test_a_message_may_take_longer_than_the_timeout() -> None:
    """Which is for silence: a slow reader is none."""
    here, there = socket.socketpair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        message = bytes(1 << 20)
        sent = beside(lambda: Channel(here, 0.3).send(message))
        came = 0
        while came < len(message) + 8:
            time.sleep(0.02)
            came += len(there.recv(1 << 14))
        assert sent() is None


def test_lengths_do_not_wait_for_what_they_tell_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with connection:
            Channel(connection, 1.0)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class SlowCarrier(carriers.ChannelCarrier):
    """Reads where the sender's pages lie, as NIXL does, and takes long."""

    def __init__(self, caches: Any, there: Any, until: threading.Event) -> None:
        super().__init__(caches)
        self._there, self._until = there, until

    def give(self, channel: Any, pages: Any) -> None:
        pass

    def take(self, channel: Any, offer: Any, into: Any) -> None:
        self._until.wait(SOON)
        for own, other in zip(self._caches, self._there, strict=True):
            own[into] = other[[3]]


def test_pages_read_after_the_sender_gave_up_are_not_returned(sockets: Any) -> None:
    ours, theirs, freed = [torch.ones(6, 4)], [torch.zeros(6, 4)], threading.Event()
    sender = PageSender(ours, sockets[0], carrier=SlowCarrier(ours, [], freed), timeout=0.3)
    carrier = SlowCarrier(theirs, ours, freed)
    receiver = PageReceiver(theirs, sockets[1], carrier=carrier, timeout=SOON)
    received = beside(lambda: receiver.receive([0]))
    assert "silent" in str(beside(lambda: sender.send([3], {"id": 1}))())
    ours[0][3] = 2  # the page holds another request now
    freed.set()
    assert isinstance(received(), TransferLost)
    assert "make a new pair" in str(beside(lambda: sender.send([3], {"id": 2}))())


def test_an_answer_to_another_hand_over_is_none(sockets: Any) -> None:
    own = caches(6)
    sender = PageSender(own, sockets[0], carrier=CARRIER(own))
    sent = beside(lambda: sender.send([0], {}))
    Channel(sockets[1], SOON).tell("earlier", "taken")
    assert "another hand-over" in str(sent())


GOOD = {"id": "a", "request": {}, "pages": 1, "caches": [], "kind": "ChannelCarrier", "where": {}}


@pytest.mark.parametrize(
    "message",
    [b"{", b"\xff", b"[]", b"{}", *(json.dumps(GOOD | changed).encode() for changed in (
        {"pages": "1"}, {"pages": True}, {"pages": -1}, {"request": None}, {"id": 3}, {"more": 1}
    ))],
)  # fmt: skip
def test_what_is_no_offer_is_an_error(sockets: Any, message: bytes) -> None:
    sender, receiver = sockets
    pages = PageReceiver(caches(0), receiver, timeout=SOON)
    Channel(sender, SOON).send(message)
    with pytest.raises(TransferLost, match="is no offer"):
        pages.receive(range(4))


@pytest.mark.parametrize("pages", [[99, 0], [-1, 0], [1, 1]])
def test_pages_that_are_none_are_refused_on_both_sides(sockets: Any, pages: list[int]) -> None:
    ours, theirs = caches(6), caches(4, seed=1)
    before = [x.clone() for x in theirs]
    sender = PageSender(ours, sockets[0], carrier=CARRIER(ours))
    receiver = PageReceiver(theirs, sockets[1], carrier=CARRIER(theirs))
    with pytest.raises(ArgumentError, match="pages"):
        sender.send(pages, {})
    sent = beside(lambda: sender.send([3, 1], {}))
    with pytest.raises(ArgumentError, match="free"):
        receiver.receive(pages)
    assert "the receiver refused: free" in str(sent())
    for own, old in zip(theirs, before, strict=True):
        assert torch.equal(own.view(torch.uint8), old.view(torch.uint8))
    sent = beside(lambda: sender.send([3, 1], {}))  # both are still in step
    assert receiver.receive([2, 0]) == ({}, [2, 0]) and sent() is None


def test_a_receiver_that_stops_reading_is_an_error(sockets: Any) -> None:
    own = [torch.zeros(8, 1 << 20)]  # more than a socket buffers
    sender = PageSender(own, sockets[0], carrier=CARRIER(own), timeout=0.3)
    sent = beside(lambda: sender.send(range(8), {}))
    channel = Channel(sockets[1], SOON)
    channel.tell(json.loads(channel.receive())["id"], "send")
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


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_the_documents_example_goes_on_where_prefill_ended(sockets: Any, length: int) -> None:
    """Its next token sees all keys and itself, also where that token begins a page."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    shown = re.search(r"## Hand-over.*?```python\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    sends, receives = shown[1].replace("812", str(length)).split("# and in the other process", 1)
    (k_cache, v_cache), pages = torch.randn(2, 8, 16, 2, 32).unbind(), [5, 1, 3][: -(-length // 16)]
    q, k, v = torch.randn(3, 1, 2, 32).unbind()
    names = {"wld": distributed, "wl": wl, "k_cache": k_cache, "v_cache": v_cache}
    sent = beside(lambda: exec(sends, {**names, "connection": sockets[0], "pages": pages}))
    own = {
        "k_cache": torch.zeros_like(k_cache), "v_cache": torch.zeros_like(v_cache),
        "connection": sockets[1], "free": [4, 2, 0, 6, 7], "q": q, "k": k, "v": v,
        "attention": wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Paged(16), num_q_heads=2, num_kv_heads=2, head_dim=32,
            dtype="float32", device="cpu", backend="reference",
        ),
    }  # fmt: skip
    exec("#" + receives, found := {**names, **own})
    assert sent() is None
    keys, values = (
        torch.cat([cache[pages].flatten(0, 1)[:length], new]).movedim(0, 1)
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    exact = torch.nn.functional.scaled_dot_product_attention(q.movedim(0, 1), keys, values)
    torch.testing.assert_close(found["out"], exact.movedim(0, 1))
