"""How large the integers of a functor can be, and which operations may leave their 32 bits.

What leaves 32 bits wraps around, in kernels as in the oracle. Where this module rules it out,
lowering writes plain arithmetic and tile analysis takes sums for what they are; elsewhere the one
wraps by name and the other looks at the numbers at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import TypeAlias

from warploom.dsl.graphs.linear import Linear
from warploom.dsl.types.ir import Kind, Node
from warploom.dsl.types.limits import MAX_HEADS, MAX_LENGTH
from warploom.dsl.types.number_types import LIMITS

Extent: TypeAlias = tuple[int, int]  # least and greatest value

INT32: Extent = (-(2**31), 2**31 - 1)
_TILE = 2**10  # rows and keys of a tile may lie past the last
_FAR = 2**62  # sums of up to this size can be added and compared in 64 bits
_SHIFTS = range(32)

_LENGTH, _HEAD, _PLACE = (0, MAX_LENGTH), (0, MAX_HEADS), (0, MAX_LENGTH + _TILE)
_POSITIONS: Mapping[str, Extent] = {
    "batch": _LENGTH,
    "q_pos": (-MAX_LENGTH, MAX_LENGTH + _TILE),
    "kv_pos": _PLACE,
    "q_len": _LENGTH,
    "kv_len": _LENGTH,
    "q_row": _PLACE,
    "q_head": _HEAD,
    "kv_head": _HEAD,
    "num_q_heads": _HEAD,
    "num_kv_heads": _HEAD,
    "lane": _HEAD,
    "head_dim": _HEAD,
}


class Extents:
    """Extents of INT expressions, each worked out once.

    Args:
        wide: of the graphs of tile analysis, which compute in 64 bits and do not wrap.
    """

    def __init__(self, wide: bool = False) -> None:
        self._wide = wide
        self._found: dict[Node, Extent] = {}

    def of(self, root: Node) -> Extent:
        """Least and greatest value, after wrapping; bools count as 0 and 1."""
        found = self.before_wrapping(root)
        return found if self._wide or within(found) else INT32

    def may_wrap(self, root: Node) -> bool:
        """Whether the operation's own result may need more than 32 bits."""
        return not within(self.before_wrapping(root))

    def before_wrapping(self, root: Node) -> Extent:
        """Least and greatest value that the operation itself gives."""
        found = self._found.get(root)
        if found is None:
            found = self._found[root] = self._of_operation(root)
        return found

    def of_sum(self, form: Linear) -> Extent:
        """Least and greatest value of a sum that does not wrap."""
        least = greatest = form.constant
        for atom, factor in form.terms.items():
            ends = sorted(factor * end for end in self.of(atom))
            least, greatest = least + ends[0], greatest + ends[1]
        return least, greatest

    def is_small(self, form: Linear) -> bool:
        """Whether 64 bits hold a sum, with room to compare it with another."""
        least, greatest = self.of_sum(form)
        return least > -_FAR and greatest < _FAR

    def _of_operation(self, root: Node) -> Extent:
        if root.kind is Kind.BOOL:
            return (0, 1)
        if root.op == "const":
            assert isinstance(root.attr, int)
            return root.attr, root.attr
        if root.op == "var":
            # or a corner of a box, as `intervals.tile_box` names them
            return _POSITIONS[str(root.attr).removesuffix("_first").removesuffix("_last")]
        if root.op == "cast":
            return self._of_cast(root)
        rule = _RULES.get(root.op)
        if rule is None or any(arg.kind is Kind.FLOAT for arg in root.args):
            return INT32  # what is loaded, or converted
        return rule(*map(self.of, root.args))

    def _of_cast(self, root: Node) -> Extent:
        limits = LIMITS[root.type]
        found = self.of(root.args[0])
        return found if within(found, limits) else limits


def within(extent: Extent, limits: Extent = INT32) -> bool:
    """Whether 32 bits, or a type of these limits, hold all of it."""
    return limits[0] <= extent[0] and extent[1] <= limits[1]


def _corners(function: Callable[[int, int], int]) -> Callable[[Extent, Extent], Extent]:
    def rule(a: Extent, b: Extent) -> Extent:
        values = [function(x, y) for x, y in product(a, b)]
        return min(values), max(values)

    return rule


def _floordiv(a: Extent, b: Extent) -> Extent:
    if b[0] > 0:
        return _corners(lambda x, y: x // y)(a, b)
    most = max(abs(end) for end in a)
    return -most, most


def _mod(a: Extent, b: Extent) -> Extent:
    if a[0] >= 0 and b[0] > 0:
        return 0, min(a[1], b[1] - 1)
    return min(b[0] + 1, 0), max(b[1] - 1, 0)


def _shl(a: Extent, b: Extent) -> Extent:
    if b[0] in _SHIFTS and b[1] in _SHIFTS:
        return _corners(lambda x, y: x << y)(a, b)
    return -_FAR, _FAR


def _bitand(a: Extent, b: Extent) -> Extent:
    tops = [greatest for least, greatest in (a, b) if least >= 0]
    return (0, min(tops)) if tops else INT32


_RULES: Mapping[str, Callable[..., Extent]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "mul": _corners(lambda x, y: x * y),
    "min": _corners(min),
    "max": _corners(max),
    "abs": lambda a: (max(a[0], -a[1], 0), max(a[1], -a[0])),
    "floordiv": _floordiv,
    "mod": _mod,
    "shl": _shl,
    "shr": lambda a, b: (min(a[0], 0), max(a[1], -1)),
    "bitand": _bitand,
    "select": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
