"""Which lanes a vector hook reads: its own and their partners come in whole vectors."""

from __future__ import annotations

from warploom.codegen.lowering.lower import reachable
from warploom.dsl.graphs.lanes import HEAD_DIM, LANE, half_partner, pair_partner
from warploom.dsl.types.ir import Node, const

_PAIR = pair_partner(LANE, HEAD_DIM)[0]
_HALF = half_partner(LANE, HEAD_DIM)[0]


def lane_reads(root: Node) -> tuple[int, dict[Node, str]]:
    """The reads of a hook that stay within two vectors, and their text in CUDA.

    Returns:
        The lanes whose halves the hook pairs (0: none, -1: the whole vector), and the text of each
        such read. Other reads go lane by lane.
    """
    halves, text = 0, {}
    for found in reachable([root]):
        if found.op != "element":
            continue
        index = found.args[0]
        if index is LANE:
            text[found] = "x.own(lane)"
        elif index is _PAIR:
            text[found] = "x.pair(lane)"
        elif (width := _halved_width(index)) and halves in (0, width):
            halves = width
            text[found] = f"x.half(lane, {'head_dim' if width < 0 else width}, head_dim)"
    return halves, text


def _halved_width(index: Node) -> int:
    """How many lanes an index pairs by their halves; 0 if it is no such index."""
    if index is _HALF:
        return -1
    if index.op != "select" or index.args[0].op != "lt":
        return 0
    half = index.args[0].args[1]
    width = half.args[0].attr if half.op == "floordiv" else None
    if isinstance(width, int) and index is half_partner(LANE, const(width))[0]:
        return width
    return 0
