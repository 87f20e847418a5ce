"""Axes of a tensor's dimensions: how long they must be, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.dsl.types.spec import TensorField
from warploom.errors import WrongShape

_EXACT = ("q_head", "kv_head", "lane")


def check_axes(field: TensorField, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    """Raise WrongShape unless each dimension is as long as its axis asks; heads exactly so.

    Args:
        field: its axes are as many as the shape has dimensions.
        shape: of its tensor.
        sizes: length that each axis asks for, 0 if the batch has none of it; one that is not there
            may be any but 0.
    """
    for axis, size in zip(field.axes, shape, strict=True):
        least = sizes.get(axis, 1) if axis else 1
        if size < least or (axis in _EXACT and axis in sizes and size != least):
            told = axes_text(field, sizes)
            if not size and least == 1:
                told = "no dimension of 0" if field.captured else f"{told}, and no dimension of 0"
            elif field.captured:
                told = _lists_text(axis, sizes)
            raise WrongShape(name=field.name, got=shape, expected=told)


def _lists_text(axis: str | None, sizes: Mapping[str, int]) -> str:
    """The shape of a BlockMask's lists, the only captured tensor whose dimensions have axes."""
    letter, noun = ("H", "query heads") if axis == "q_head" else ("B", "requests")
    size = sizes.get(axis or "", 1)
    return (
        f"[requests or 1, query heads or 1, blocks of queries, blocks of keys], for {size} {noun}: "
        f"make the BlockMask with {letter}={size}, or {letter}=None where all are alike"
    )


def axes_text(field: TensorField, sizes: Mapping[str, int]) -> str:
    """The shape that a field asks for, as it is told to the user."""

    def one(axis: str | None) -> str:
        if axis is None or axis not in sizes:
            return axis or "any"
        return f"{axis}{'=' if axis in _EXACT else '>='}{sizes[axis]}"

    return f"[{', '.join(one(axis) for axis in field.axes)}]"
