"""Which sizes a tensor of no axes should have, read off the expressions that index it."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.dsl.types.ir import Kind, node, var, walk
from warploom.dsl.types.spec import TracedVariant

# A dimension is indexed by these positions as they are, or by these constants.
Indices = frozenset[str | int]
# A row's number within its request is an expression of other positions (dsl/values/position.py).
# It is made without a place in the code, which would be shown as that of every user's at.q_idx.
_BEFORE_QUERIES = node("sub", Kind.INT, (var("kv_len"), var("q_len")))
Q_IDX = node("sub", Kind.INT, (var("q_pos"), _BEFORE_QUERIES))


def rows_are_read_as(traced: TracedVariant) -> list[str]:
    """Which of `q_pos`, a row's place among the keys, and `q_idx`, its number, functors read."""
    seen = {Q_IDX}
    rest = list(traced.roots)
    read = set[str]()
    while rest:
        current = rest.pop()
        if current is Q_IDX:
            read.add("q_idx")
        elif current not in seen:
            seen.add(current)
            rest.extend(current.args)
            if current.op == "var" and current.attr == "q_pos":
                read.add("q_pos")
    return sorted(read, reverse=True)


def direct_indices(traced: TracedVariant) -> dict[str, tuple[Indices, ...]]:
    """For each tensor: what indexes each of its dimensions directly.

    Computed indices are left out: what they need depends on data, and loads clamp them.
    """
    found: dict[str, list[set[str | int]]] = {
        field.name: [set() for _ in field.axes] for field in traced.tensors
    }
    for load in walk(*traced.roots):
        if load.op == "load" and load.attr in found:
            for dim, index in enumerate(load.args):
                if index is Q_IDX:
                    found[str(load.attr)][dim].add("q_idx")
                elif index.op == "var":
                    found[str(load.attr)][dim].add(str(index.attr))
                elif index.op == "const" and isinstance(index.attr, int):
                    found[str(load.attr)][dim].add(index.attr)
    return {name: tuple(map(frozenset, dims)) for name, dims in found.items()}


def needed_sizes(indices: tuple[Indices, ...], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """The least size of each dimension.

    Args:
        indices: what indexes each dimension directly.
        lengths: one more than the largest value of each position.
    """
    return tuple(
        max((lengths.get(i, 0) if isinstance(i, str) else i + 1 for i in dim), default=0)
        for dim in indices
    )
