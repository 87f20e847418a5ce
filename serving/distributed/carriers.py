"""Ways of pages from a sender's caches into a receiver's: through the channel, or by NIXL."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from warploom.errors import MissingPackage
from warploom.serving.distributed.channel import Channel
from warploom.serving.distributed.errors import TransferLost

_PAUSE = 20e-6  # seconds between looks at a transfer


class Carrier(Protocol):
    """How pages come from the sender's caches into the receiver's; one of each side."""

    def offered(self, pages: Sequence[int]) -> dict[str, str]:
        """What the receiver must know to get at these pages."""
        ...

    def give(self, channel: Channel, pages: Sequence[int]) -> None:
        """The sender's part, once the receiver wants the pages."""

    def take(self, channel: Channel, offer: dict[str, str], into: Sequence[int]) -> None:
        """The receiver's part: fill own pages, in the order of the offer's."""


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
        offer = {"agent": self._agent.get_agent_metadata(), "places": places}
        return {name: base64.b64encode(value).decode() for name, value in offer.items()}

    def give(self, channel: Channel, pages: Sequence[int]) -> None:
        pass  # the receiver reads

    def take(self, channel: Channel, offer: dict[str, str], into: Sequence[int]) -> None:
        if not into:
            return
        peer_offer = {name: base64.b64decode(value) for name, value in offer.items()}
        try:
            peer = self._agent.add_remote_agent(peer_offer["agent"])
            there = self._agent.deserialize_descs(peer_offer["places"])
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


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.view(-1).view(torch.uint8)
