"""Data-parallel groups: which one a request goes to, and which one it moves to.

xLLM, 4.4.3: placement by the room in the KV cache (layer 1), and migration between groups that
compute in step (layer 2). Layer 3, inside a kernel, is `cores.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from warploom.serving.simulation.batcher import Batcher, Served
from warploom.simulation_errors import BadSetup


class Placement(Protocol):
    """Chooses a group when a request arrives."""

    @property
    def name(self) -> str: ...

    def choose(self, number: int, groups: Sequence[Batcher]) -> int:
        """Index of the group of the request that arrives as the `number`-th, from 0 on."""
        ...


@dataclass(frozen=True)
class Hashed:
    """By the request alone, whatever the groups have: what sessions that stick come to.

    Attributes:
        seed: of the hash.
    """

    seed: int = 0
    name: str = "hashed"

    def choose(self, number: int, groups: Sequence[Batcher]) -> int:
        return int(np.random.default_rng((self.seed, number)).integers(len(groups)))


@dataclass(frozen=True)
class RoundRobin:
    """One after another."""

    name: str = "round robin"

    def choose(self, number: int, groups: Sequence[Batcher]) -> int:
        return number % len(groups)


@dataclass(frozen=True)
class LeastRequests:
    """Where the fewest are, waiting or served; the first of equals."""

    name: str = "least requests"

    def choose(self, number: int, groups: Sequence[Batcher]) -> int:
        return min(range(len(groups)), key=lambda i: groups[i].requests)


@dataclass(frozen=True)
class LeastTokens:
    """Where most room is left in the KV cache, counting prompts that wait (xLLM, layer 1)."""

    name: str = "least KV tokens"

    def choose(self, number: int, groups: Sequence[Batcher]) -> int:
        return max(
            range(len(groups)), key=lambda i: groups[i].limits.kv_tokens - groups[i].kv_tokens
        )


@dataclass(frozen=True)
class Migration:
    """Before a step, one request at most moves from the fullest group to the emptiest.

    Attributes:
        threshold: tokens by which they must differ.

    Raises:
        BadSetup: a threshold below 1.
    """

    threshold: int = 2000

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise BadSetup(name="threshold", got=self.threshold, expected="at least one token")

    def move(self, groups: Sequence[Batcher]) -> Served | None:
        """Move the request that evens them out best; it has a new group. None: nobody moved."""
        keys = [sum(one.keys for one in group.running.values()) for group in groups]
        full, empty = keys.index(max(keys)), keys.index(min(keys))
        gap = keys[full] - keys[empty]
        # moving more than the gap would only turn the two around
        able = [
            one
            for one in groups[full].running.values()
            if one.read == one.request.prompt
            and one.planned < one.request.output  # else its keys would move for nothing
            and 0 < one.keys < gap
            and groups[empty].takes(one)
        ]
        if gap < self.threshold or not able:
            return None
        moved = min(able, key=lambda one: abs(one.keys - gap / 2))
        groups[full].leave(moved)
        groups[empty].enter(moved)
        moved.group = empty
        return moved
