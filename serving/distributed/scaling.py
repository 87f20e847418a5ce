"""What context parallelism sends, what of it hides, and how far it should scale: a model on paper.

Times are of one layer's attention, from rates that the caller states; nothing is measured here.
Ranks are numbered node by node. Links within a node and between nodes differ, and an exchange is as
slow as the slowest link that it needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.serving.distributed.states import bytes_per_state


@dataclass(frozen=True)
class Heads:
    """A model's attention: query and key/value heads, their dimension, and bytes of an element."""

    num_q: int
    num_kv: int
    dim: int
    element: int = 2

    def key_bytes(self, tokens: float) -> float:
        """Of keys and values of so many tokens."""
        return tokens * self.num_kv * 2 * self.dim * self.element


@dataclass(frozen=True)
class Machine:
    """GPUs and what joins them.

    Attributes:
        flops: of attention, per second and GPU.
        memory: bytes per second that attention reads of its own memory.
        node: GPUs of a node.
        inside, between: bytes per second and GPU, one way, within a node and between nodes.
        latency_inside, latency_between: seconds of an exchange, without its bytes.
    """

    flops: float
    memory: float
    node: int
    inside: float
    between: float
    latency_inside: float
    latency_between: float

    def exchange(self, sent_inside: float, sent_between: float) -> float:
        """Seconds of an exchange in which a GPU sends so many bytes over either kind of link."""
        within = self.latency_inside + sent_inside / self.inside
        if not sent_between:
            return within
        return max(within, self.latency_between + sent_between / self.between)


@dataclass(frozen=True)
class Estimate:
    """One layer's attention on one rank.

    Attributes:
        sent: bytes that a rank sends.
        alone: seconds of the same work on one rank.
        compute: seconds of this rank's attention.
        exchange: seconds of all exchanges, if nothing hid them.
        seconds: of both, with what overlaps.
    """

    sent: float
    alone: float
    compute: float
    exchange: float
    seconds: float

    @property
    def hidden(self) -> float:
        """Share of the exchange that attention hides."""
        if not self.exchange:
            return 1.0
        return (self.compute + self.exchange - self.seconds) / self.exchange

    @property
    def speedup(self) -> float:
        """Over one rank."""
        return self.alone / self.seconds


def decode_bytes(heads: Heads, rows: int, world: int, own_heads: bool) -> tuple[float, float]:
    """What a rank sends to each other one in a step: bytes of queries, and of states.

    Args:
        heads: of the model.
        rows: query rows of the batch.
        world: ranks.
        own_heads: as `DecodeWrapper(heads="own")`.
    """
    state = rows * heads.num_q * bytes_per_state(heads.dim, heads.element)
    if not own_heads:
        return 0.0, state
    return rows * heads.num_q / world * heads.dim * heads.element, state / world


def decode(
    heads: Heads, machine: Machine, *, rows: int, tokens: int, world: int, own_heads: bool = False
) -> Estimate:
    """A step of decoding: reading keys bounds it, and nothing hides its exchanges.

    Args:
        heads: of the model.
        machine: its rates.
        rows: requests, with one query row each.
        tokens: of each request's context.
        world: ranks.
        own_heads: as `DecodeWrapper(heads="own")`.
    """
    alone = heads.key_bytes(rows * tokens) / machine.memory
    if world == 1:
        return Estimate(0.0, alone, alone, 0.0, alone)
    inside = min(world, machine.node) - 1
    outside = world - 1 - inside
    each = [part for part in decode_bytes(heads, rows, world, own_heads) if part]
    exchange = sum(machine.exchange(inside * part, outside * part) for part in each)
    sent = (world - 1) * sum(each)
    return Estimate(sent, alone, alone / world, exchange, alone / world + exchange)


def prefill_flops(heads: Heads, tokens: float) -> float:
    """Of causal attention: two products of head_dim for each pair, half of which is visible."""
    return 4 * heads.num_q * heads.dim * tokens * tokens / 2


def ring(heads: Heads, machine: Machine, *, tokens: int, world: int) -> Estimate:
    """A causal prefill of one sequence by a zig-zag ring.

    In each of `world` steps a rank computes 1 / world of its work, while the next keys come. Time
    is then that of the slower one in all steps but the last, and of attention in that.

    Args:
        heads: of the model.
        machine: its rates.
        tokens: of the sequence.
        world: ranks.
    """
    alone = prefill_flops(heads, tokens) / machine.flops
    step, block = alone / world / world, heads.key_bytes(tokens / world)
    if world == 1:
        return Estimate(0.0, alone, alone, 0.0, alone)
    hop = machine.exchange(block, block if world > machine.node else 0.0)
    seconds = (world - 1) * max(step, hop) + step
    return Estimate((world - 1) * block, alone, world * step, (world - 1) * hop, seconds)


def all_gather(heads: Heads, machine: Machine, *, tokens: int, world: int) -> Estimate:
    """The same by collecting all keys first, which nothing hides; arguments as of `ring`."""
    alone = prefill_flops(heads, tokens) / machine.flops
    if world == 1:
        return Estimate(0.0, alone, alone, 0.0, alone)
    block, inside = heads.key_bytes(tokens / world), min(world, machine.node) - 1
    exchange = machine.exchange(inside * block, (world - 1 - inside) * block)
    return Estimate((world - 1) * block, alone, alone / world, exchange, alone / world + exchange)


def hiding_tokens(heads: Heads, flops: float, link: float) -> int:
    """Tokens of a rank from which on a causal ring hides its exchanges.

    Attention of t rows to t keys, half of them visible, against the bytes of t keys:
    t = num_kv * element * flops / (num_q * link). With as many key/value heads as query heads, no
    mask, and 2 bytes, it is half of that, which is Ring Attention's flops / link (Liu et al. 2023,
    section 3).

    Args:
        heads: of the model.
        flops: of attention, per second.
        link: bytes per second, one way.
    """
    return math.ceil(heads.num_kv * heads.element * flops / (heads.num_q * link))
