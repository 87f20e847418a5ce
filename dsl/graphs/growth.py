"""How a transform of vectors grows with the vector that it is given.

A scale that is multiplied in behind a transform stands for one before it if the transform is as
many times as large for a vector so many times as large: rotations are, and norms are not.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TypeAlias

from warploom.dsl.types.ir import COMPARISONS, REDUCTIONS, Node, walk

Power: TypeAlias = Fraction | None  # None: no power is known

_SAME = REDUCTIONS | {"neg", "abs"}  # grow as their operand does
_ALIKE = {"add", "sub", "min", "max"}  # and these as both of theirs do


def power(root: Node) -> Power:
    """The n with f(c v) = c^n f(v) for all c > 0, of an expression f of `element`s of a vector v.

    Args:
        root: of a vector hook.

    Returns:
        n, or None where it is not known to be any: of sums of unlike powers, and of functions that
        grow in no power.
    """
    known: dict[Node, Power] = {}
    for found in walk(root):
        known[found] = _power(found, [known[arg] for arg in found.args])
    return known[root]


def _power(found: Node, args: list[Power]) -> Power:
    op = found.op
    if None in args:
        return None
    of = [arg for arg in args if arg is not None]
    if op == "element":
        return Fraction(1) if not any(of) else None
    if op in ("mul", "div"):
        return of[0] + of[1] if op == "mul" else of[0] - of[1]
    if op in ("sqrt", "rsqrt"):
        return of[0] / (2 if op == "sqrt" else -2)
    if op in _SAME:
        return of[0]
    if op in _ALIKE:
        return of[0] if of[0] == of[1] else None
    if op in COMPARISONS:
        return Fraction(0) if of[0] == of[1] else None
    if op == "select":
        return of[1] if of[0] == 0 and of[1] == of[2] else None
    return Fraction(0) if not any(of) else None
