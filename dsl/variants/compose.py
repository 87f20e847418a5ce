"""`a & b`: masks are and-ed, transforms chained from left to right, fields merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants import check
from warploom.dsl.variants.fields import READING, Field, Reading
from warploom.dsl.variants.variant import Variant, as_part
from warploom.errors import ComposeClash


class Composed(Variant):
    """Several variants as one; make it with `&`."""

    def __init__(self, parts: tuple[Variant, ...], softmax: bool | None) -> None:
        self.parts = parts
        if softmax is not None:
            self.softmax = softmax

    def _chain(self, seat: str, value: Value, at: Position) -> Value:
        for part in self.parts:
            value = check.checked(part, seat, getattr(part, seat)(value, at))
        return value

    def query_transform(self, q: Value, at: Position) -> Value:
        return self._chain("query_transform", q, at)

    def key_transform(self, k: Value, at: Position) -> Value:
        return self._chain("key_transform", k, at)

    def value_transform(self, v: Value, at: Position) -> Value:
        return self._chain("value_transform", v, at)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self._chain("logits_transform", logits, at)

    def output_transform(self, o: Value, at: Position) -> Value:
        return self._chain("output_transform", o, at)

    def logits_mask(self, at: Position) -> Value:
        visible: Value = True
        for part in self.parts:
            visible = visible & check.checked(part, "logits_mask", part.logits_mask(at))
        return visible

    @property
    def name(self) -> str:
        return "_".join(part.name for part in self.parts)

    def fields(self) -> dict[str, Field]:
        # __setattr__ asks before `parts` is there
        parts = self.__dict__.get("parts", ())
        return {name: field for part in parts for name, field in part.fields().items()}

    def inputs(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.inputs().items()}

    def functors(self) -> list[tuple[str, Any]]:
        return [found for part in self.parts for found in part.functors()]

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        for part in self.parts:
            part.check_lengths(known, q_lens, kv_lens)

    def under(self, reading: Reading) -> Composed:
        made = copy.copy(self)
        made.__dict__["parts"] = tuple(part.under(reading) for part in self.parts)
        made.__dict__[READING] = reading
        return made

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


def compose(*variants: Any) -> Composed:
    """Join variants; what `&` calls.

    Args:
        *variants: instances, or classes whose constructor needs no arguments.

    Raises:
        ComposeClash: two parts with different fields of the same name, or with different
            `softmax`.
        ArgumentError: something that is no variant, or a class that wants arguments.
    """
    parts = tuple(part for variant in variants for part in _parts(variant))
    softmax: bool | None = None
    owner: dict[str, Variant] = {}
    for part in parts:
        for name in part.fields():
            if name in owner and not owner[name].shares(name, part):
                reason = f"both have a field {name!r}; rename one, or what flex() captured"
                raise _clash(owner[name], part, reason)
            owner[name] = part
        if part.decides_softmax():
            if softmax is not None and softmax != part.softmax:
                raise _clash(parts[0], part, "one normalises with softmax, the other does not")
            softmax = part.softmax
    return Composed(parts, softmax)


def _parts(variant: Any) -> tuple[Variant, ...]:
    made = as_part(variant)
    return made.parts if isinstance(made, Composed) else (made,)


def _clash(left: Variant, right: Variant, reason: str) -> ComposeClash:
    return ComposeClash(left=left.name, right=right.name, reason=reason)
