"""How a transform grows with the vector, or the logit, that it is given.

A scale that is multiplied in behind a transform stands for one before it if the transform is as
many times as large for a vector so many times as large: rotations and products are, and norms,
soft-caps and biases are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf
from typing import TypeAlias

from warploom.dsl.types.ir import COMPARISONS, REDUCTIONS, Node, walk

Power: TypeAlias = Fraction | None  # None: no power is known

_SAME = REDUCTIONS | {"neg", "abs"}  # grow as their operand does
_ALIKE = {"add", "sub", "min", "max"}  # and these as both of theirs do
_STILL = (0, inf, -inf)  # numbers that are the same so many times as large


def power(root: Node) -> Power:
    """The n with f(c v) = c^n f(v) for all c > 0, of an expression f of a logit or of the
    `element`s of a vector v.

    Args:
        root: of a hook that gets a vector or a logit.

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
    if op == "logits":
        return Fraction(1)
    if op == "element":
        return Fraction(1) if not any(of) else None
    if op in ("mul", "div"):
        return of[0] + of[1] if op == "mul" else of[0] - of[1]
    if op in ("sqrt", "rsqrt"):
        return of[0] / (2 if op == "sqrt" else -2)
    if op in _SAME:
        return of[0]
    if op in _ALIKE:
        return _common(found.args, of)
    if op in COMPARISONS:
        return None if _common(found.args, of) is None else Fraction(0)
    if op == "select":
        return _common(found.args[1:], of[1:]) if of[0] == 0 else None
    return Fraction(0) if not any(of) else None


def _common(args: Sequence[Node], powers: Sequence[Fraction]) -> Power:
    """The power of all of them, or None; zeros and infinities have any."""
    pairs = zip(args, powers, strict=True)
    of = {power for arg, power in pairs if not (arg.op == "const" and arg.attr in _STILL)}
    return None if len(of) > 1 else of.pop() if of else Fraction(0)
