"""Attention over several ranks: context parallelism for prefill and decode, and hand-over of pages.

Names are loaded when they are asked for. The group is one of `torch.distributed`; see
docs/distributed.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.lazy import lazy_names

if TYPE_CHECKING:
    from warploom.serving.distributed.carriers import ChannelCarrier as ChannelCarrier
    from warploom.serving.distributed.carriers import NixlCarrier as NixlCarrier
    from warploom.serving.distributed.decode import DecodeWrapper as DecodeWrapper
    from warploom.serving.distributed.errors import OutOfStep as OutOfStep
    from warploom.serving.distributed.errors import RankLost as RankLost
    from warploom.serving.distributed.errors import TransferLost as TransferLost
    from warploom.serving.distributed.handover import PageReceiver as PageReceiver
    from warploom.serving.distributed.handover import PageSender as PageSender
    from warploom.serving.distributed.layouts import Interleaved as Interleaved
    from warploom.serving.distributed.layouts import ZigZag as ZigZag
    from warploom.serving.distributed.layouts import zigzag_order as zigzag_order
    from warploom.serving.distributed.prefill import PrefillWrapper as PrefillWrapper
    from warploom.serving.distributed.prefill import all_gather_attention as all_gather_attention
    from warploom.serving.distributed.prefill import ring_attention as ring_attention

_HOME = {
    "ChannelCarrier": "carriers",
    "DecodeWrapper": "decode",
    "Interleaved": "layouts",
    "NixlCarrier": "carriers",
    "OutOfStep": "errors",
    "PageReceiver": "handover",
    "PageSender": "handover",
    "PrefillWrapper": "prefill",
    "RankLost": "errors",
    "TransferLost": "errors",
    "ZigZag": "layouts",
    "all_gather_attention": "prefill",
    "ring_attention": "prefill",
    "zigzag_order": "layouts",
}

if not TYPE_CHECKING:  # there the imports above say it
    __all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_names(__name__, "warploom.serving.distributed", _HOME)
