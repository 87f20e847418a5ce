"""Captured float64 tensors: where rounding them to float32 changes little, and where it is refused.

torch computes in float64 with them, kernels in float32. A bias or a factor of the score loses no
more than the score itself has lost. Where large numbers are compared or subtracted, as timestamps
are, nothing may be left of them.
"""

from __future__ import annotations

from collections.abc import Collection

from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import CannotTrace

_KEEPING = frozenset({"mul", "div", "neg", "abs", "min", "max", "select"})  # relative errors


def check_doubles(traced: TracedVariant, names: Collection[str]) -> None:
    """Look at what becomes of tensors whose values are rounded.

    Args:
        traced: the variant.
        names: of the fields that stand for float64 tensors.

    Raises:
        CannotTrace: one is used for more than a bias, a factor or a replacement of the score.
    """
    found: dict[Node, str | None] = {}  # the field that a value was rounded from
    scores: set[Node] = set()  # of the score's own precision
    for current in walk(*traced.hooks.values()) if names else ():
        rounded = next((found[arg] for arg in current.args if found[arg]), None)
        if current.op in ("load", "scalar") and current.attr in names:
            rounded = str(current.attr)
        elif current.op == "logits" or not scores.isdisjoint(current.args):
            scores.add(current)
            rounded = None
        elif rounded is not None and current.op not in _KEEPING:
            raise CannotTrace(
                what=f"{current.op} of numbers of {rounded!r}, a float64 tensor,",
                remedy="Kernels compute in float32. Capture it as .float(); of large numbers, "
                "such as timestamps, subtract an origin before that, or number them as int32.",
                source=current.source,
            )
        found[current] = rounded
