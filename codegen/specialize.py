"""What a kernel may know beyond its spec: it is compiled for one number of heads in a group."""

from __future__ import annotations

from dataclasses import replace

from warploom.dsl.ir import Kind, node, substitute
from warploom.dsl.spec import AttentionSpec

_Q_HEAD = node("var", Kind.INT, attr="q_head")
_KV_HEAD = node("var", Kind.INT, attr="kv_head")


def for_group_size(spec: AttentionSpec, group_size: int) -> AttentionSpec:
    """The spec that kernels are made of, for this many query heads per key/value head.

    Rows of a tile belong to different query heads of one key/value head. With one query head each,
    the two numbers are equal, and what reads the head is the same for a whole tile.
    """
    if group_size != 1:
        return spec
    seats = {
        seat: substitute(root, {_Q_HEAD: _KV_HEAD}) for seat, root in spec.variant.seats.items()
    }
    return replace(spec, variant=replace(spec.variant, seats=seats))
