"""Vectors over the head dimension: rotations substitute the lane, reductions bind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types import location
from warploom.dsl.types.ir import REDUCTIONS, Kind, Node, const, substitute, var, walk
from warploom.errors import ArgumentError

LANE = var("lane")
HEAD_DIM = var("head_dim")

# (lane, rotated width) -> (lane it takes its value from, whether the sign flips); on nodes
Partner: TypeAlias = Callable[[Node, Node], tuple[Node, Node]]


def half_partner(lane: Node, width: Node) -> tuple[Node, Node]:
    half = build.arithmetic("floordiv", width, const(2))
    first = build.compare("lt", lane, half)
    up = build.arithmetic("add", lane, half)
    down = build.arithmetic("sub", lane, half)
    return build.select(first, up, down), first


def pair_partner(lane: Node, width: Node) -> tuple[Node, Node]:
    even = build.compare("eq", build.logic("and", lane, const(1)), const(0))
    return build.logic("xor", lane, const(1)), even


def is_vector(root: Node) -> bool:
    """True if the value depends on the lane outside of reductions."""
    return any(found is LANE for found in _open_nodes(root))


def checked_dim(dim: Any) -> int:
    """The number of lanes to rotate, which are paired.

    Raises:
        ArgumentError: not an even int of at least 2.
    """
    whole = isinstance(dim, (int, np.integer)) and not isinstance(dim, bool)
    if not whole or dim < 2 or dim % 2:
        reason = f"is {dim!r}; expected an even int of at least 2: lanes are rotated in pairs"
        raise ArgumentError(name="dim", reason=reason, source=location.source(location.caller()))
    return int(dim)


def permute_node(root: Node, partner: Partner, dim: int | None) -> Node:
    """The expression with each lane's value taken from its partner, sign included."""
    width = HEAD_DIM if dim is None else const(dim)
    source, flips = partner(LANE, width)
    taken = _at_lane(root, source)
    rotated = build.select(flips, build.negate(taken), taken)
    return rotated if dim is None else build.select(build.compare("lt", LANE, width), rotated, root)


def reduce_node(op: str, body: Node) -> Node:
    return build.make(op, Kind.FLOAT, build.to_kind(body, Kind.FLOAT))


def permute_array(x: Any, partner: Partner, dim: int | None) -> Any:
    """The NumPy reading of `permute_node`; x is [..., head_dim].

    Raises:
        ArgumentError: x is narrower than `dim`, or of odd width where all lanes are rotated.
    """
    lanes = x.shape[-1]
    width = checked_dim(lanes) if dim is None else dim
    if width > lanes:
        reason = f"{width} lanes are rotated, but head_dim is {lanes}; give dim={lanes} or less"
        raise ArgumentError(name="dim", reason=reason, source=location.source(location.caller()))
    lane = np.arange(width)
    if partner is half_partner:
        source, flips = (lane + width // 2) % width, lane < width // 2
    else:
        source, flips = lane ^ 1, lane % 2 == 0
    rotated = np.where(flips, -x[..., source], x[..., source])
    return np.concatenate([rotated, x[..., width:]], axis=-1)


def _at_lane(root: Node, lane: Node) -> Node:
    """`root` at another lane; reductions bind their own lane and stay."""
    kept = {found: found for found in walk(root) if found.op in REDUCTIONS}
    return substitute(root, {**kept, LANE: lane})


def _open_nodes(root: Node) -> set[Node]:
    seen: set[Node] = set()
    stack = [root]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            if current.op not in REDUCTIONS:
                stack.extend(current.args)
    return seen


def reduces_lanes(*roots: Node) -> bool:
    """True if one of these vectors needs a sum or maximum over lanes, as norms do."""
    return any(found.op in REDUCTIONS for found in walk(*roots))


def reads_other_lanes(*roots: Node) -> bool:
    """True if a lane of one of these vectors is made of another lane, as RoPE's partners are."""
    return any(found.op == "element" and found.args[0] is not LANE for found in walk(*roots))
