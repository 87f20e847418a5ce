"""Masks made of bounds of the key's position: what a row sees of many keys is found at once.

A bound holds for a run of keys. So a kernel tests no key for it: where the run ends, it makes a
word with a bit for each key that a thread has, and joins words as the mask joins its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from warploom.codegen.lowering.lower import Block
from warploom.codegen.lowering.split import Level, levels
from warploom.dsl.graphs import fold
from warploom.dsl.graphs.extents import Extent, Extents, within
from warploom.dsl.graphs.linear import Linear, linear
from warploom.dsl.types.ir import Kind, Node, const, node, var, walk

_KV_POS = var("kv_pos")
_CLOSED = {"lt": ("le", -1), "le": ("le", 0), "gt": ("ge", 1), "ge": ("ge", 0)}
_SIDE: Extent = (-(2**30), 2**30)  # sums of a few positions
_LIMIT: Extent = (-(2**31) + 2**29, 2**31 - 2**29)  # leaves room for the difference to a position
_KNOWN = (Level.TILE, Level.ROW)  # before there is a key


def of_bounds(mask: Node) -> Node | None:
    """An equal mask that `bits_text` takes; None if it asks a key for more than its position.

    Its leaves are `kv_pos <= limit` and `kv_pos >= limit` of limits within `_LIMIT`, and conditions
    of a row.
    """
    return _where(mask, True, levels([mask]))


def _where(root: Node, wanted: bool, known: Mapping[Node, Level]) -> Node | None:
    """The same of where `root` is equal to `wanted`."""
    if known[root] in _KNOWN:
        return root if wanted else fold.invert(root)
    if root.op == "not":
        return _where(root.args[0], not wanted, known)
    if root.op not in ("and", "or"):
        return _bound(root, wanted, known)
    left, right = (_where(arg, wanted, known) for arg in root.args)
    if left is None or right is None:
        return None
    op = "and" if (root.op == "and") is wanted else "or"
    return node(op, Kind.BOOL, (left, right), source=root.source)


def _bound(root: Node, wanted: bool, known: Mapping[Node, Level]) -> Node | None:
    """A comparison as `kv_pos <= limit` or `kv_pos >= limit`."""
    if root.op not in fold.TURNED or root.args[0].kind is not Kind.INT:
        return None
    op, (side, other) = root.op if wanted else fold.OPPOSITE[root.op], root.args
    if known[side] in _KNOWN:
        op, side, other = fold.TURNED[op], other, side
    if known[other] not in _KNOWN:
        return None
    extents, sum_ = Extents(), linear(side)
    factor = sum_.terms.get(_KV_POS, 0)
    rest = sum_ - Linear({_KV_POS: factor})
    if abs(factor) != 1 or any(known[atom] not in _KNOWN for atom in rest.terms):
        return None
    wraps = any(extents.may_wrap(part) for part in walk(side) if part.kind is Kind.INT)
    if wraps or not within(extents.of(side), _SIDE):
        return None
    if factor < 0:
        op = fold.TURNED[op]
    closed, step = _CLOSED[op]
    for compared in (other, _next_to(other, extents.of(side))):
        limit = (Linear({compared: 1}) - rest) * factor + Linear({}, step)
        if within(extents.of_sum(limit), _LIMIT):
            return node(closed, Kind.BOOL, (_KV_POS, limit.node()), source=root.source)
    return None


def _next_to(number: Node, extent: Extent) -> Node:
    """What compares with all numbers of an extent as another does, and is next to it at most."""
    above = fold.arithmetic("max", number, const(extent[0] - 1))
    return fold.arithmetic("min", above, const(extent[1] + 1))


def known_parts(mask: Node) -> Iterator[Node]:
    """Limits and conditions of a row in a mask that `of_bounds` has made: all but comparisons,
    which are no more work than reading what would be kept of a column."""
    known = levels([mask])
    for found in walk(mask):
        if known[found] not in _KNOWN and found is not _KV_POS:
            yield from (arg for arg in found.args if known[arg] in _KNOWN)
    if known[mask] in _KNOWN:
        yield mask


def shows_runs(mask: Node) -> bool:
    """Whether each row sees a single run of keys, by a mask that `of_bounds` has made."""
    known = levels([mask])
    conditions = fold.conjuncts(mask)
    return all(found.op in ("le", "ge") for found in conditions if known[found] not in _KNOWN)


def bits_text(mask: Node, block: Block) -> str:
    """C++ text of the bits of all keys, by `keys.upto`, `keys.from` and `keys.all_if`.

    Args:
        mask: that `of_bounds` has made.
        block: where limits and conditions are computed first.
    """
    return _bits_text(mask, block, levels([mask]))


def _bits_text(mask: Node, block: Block, known: Mapping[Node, Level]) -> str:
    if known[mask] in _KNOWN:
        return f"keys.all_if({block.compute([mask])[0]})"
    if mask.op in ("le", "ge"):
        name = "upto" if mask.op == "le" else "from"
        return f"keys.{name}({block.compute([mask.args[1]])[0]})"
    sign = " & " if mask.op == "and" else " | "
    parts = [_bits_text(arg, block, known) for arg in mask.args]
    joined = [known[arg] not in _KNOWN and arg.op in ("and", "or") for arg in mask.args]
    return sign.join(
        f"({part})" if is_joined else part for part, is_joined in zip(parts, joined, strict=True)
    )
