"""Keys of a decoding batch on the cores of a device: in turn, longest first, or cut.

xLLM, 4.4.3, layer 3: kernels that give each request one core wait for the longest; requests are
reordered by their load, and the longest are cut, as FlashInfer's Algorithm 1 and Stream-K do.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Literal

from warploom.scheduler.model.cost import PARTIAL, CostModel

Spreading = Literal["in turn", "longest first", "cut"]
SPREADINGS: tuple[Spreading, ...] = ("in turn", "longest first", "cut")

_TILE = 16, 128  # rows and keys of a decoding tile, for the least chunk that is cut off


def heaviest(keys: Sequence[int], cores: int, spreading: Spreading) -> float:
    """Keys of the core that has most.

    Args:
        keys: of each unit of work, a request and one of its key/value heads.
        cores: of the device.
        spreading: how units get to cores. Where they are cut, a partial result costs as many keys
            as the planner counts for it, and no piece is shorter than what the planner would cut.
    """
    if not keys:
        return 0.0
    if spreading == "in turn":
        return max(sum(keys[i::cores]) for i in range(cores))
    whole = _longest_first(keys, cores)
    if spreading == "longest first":
        return whole
    least = CostModel.for_stream_k(*_TILE).grain * _TILE[1]
    return min(whole, max(sum(keys) / cores, least) + PARTIAL)


def _longest_first(keys: Sequence[int], cores: int) -> float:
    loads = [0] * cores
    heapify(loads)
    for length in sorted(keys, reverse=True):
        heapreplace(loads, loads[0] + length)
    return max(loads)
