"""`a & b`: masks are and-ed, transforms chained from left to right, fields merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants import check
from warploom.dsl.variants.fields import READING, Field, Reading
from warploom.dsl.variants.variant import Variant, as_link
from warploom.errors import ArgumentError, ChainClash


class ChainedVariant(Variant):
    """Several variants combined into one by `&`."""

    def __init__(self, links: tuple[Variant, ...], softmax: bool | None) -> None:
        self.links = links
        if softmax is not None:
            self.softmax = softmax

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.fields():
            owner = next(link for link in self.links if name in link.fields()).name
            reason = f"is no value of the chain, which has none; set it on the {owner} before"
            raise ArgumentError(name=name, reason=f"{reason}, or give {name}=... to plan or run")
        for link in self.__dict__.get("links", ()):
            if name in link.left_out:  # raises the link's own error
                setattr(link, name, value)
        super().__setattr__(name, value)

    def _chain(self, hook: str, value: Value, at: Position) -> Value:
        for link in self.links:
            value = check.checked(link, hook, getattr(link, hook)(value, at))
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
        for link in self.links:
            visible = visible & check.checked(link, "logits_mask", link.logits_mask(at))
        return visible

    @property
    def name(self) -> str:
        return "_".join(link.name for link in self.links)

    def fields(self) -> dict[str, Field]:
        # __setattr__ calls this before `links` is set
        links = self.__dict__.get("links", ())
        return {name: field for link in links for name, field in link.fields().items()}

    def inputs(self) -> dict[str, Any]:
        return {name: value for link in self.links for name, value in link.inputs().items()}

    def traceable_inputs(self) -> dict[str, Any]:
        links = self.links
        return {name: x for link in links for name, x in link.traceable_inputs().items()}

    def functors(self) -> list[tuple[str, Any]]:
        return [found for link in self.links for found in link.functors()]

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        for link in self.links:
            link.check_lengths(known, q_lens, kv_lens)

    @property
    def checks_lengths(self) -> bool:
        return any(link.checks_lengths for link in self.links)

    @property
    def obstacle_to_appending(self) -> str | None:
        return next(filter(None, (link.obstacle_to_appending for link in self.links)), None)

    def under(self, reading: Reading) -> ChainedVariant:
        made = copy.copy(self)
        made.__dict__["links"] = tuple(link.under(reading) for link in self.links)
        made.__dict__[READING] = reading
        return made

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.links))


def chain(*variants: Any) -> ChainedVariant:
    """Chain variants; `&` calls this.

    Args:
        *variants: instances, or classes whose constructor needs no arguments.

    Raises:
        ChainClash: two variants have different fields of the same name, or different `softmax`.
        ArgumentError: an argument is no variant, or a class whose constructor needs arguments.
    """
    links = tuple(link for variant in variants for link in _links(variant))
    decider: Variant | None = None
    owner: dict[str, Variant] = {}
    for link in links:
        for name in link.fields():
            if name in owner and not owner[name].shares(name, link):
                reason = f"both have a field {name!r}; rename one, or what flex() captured"
                raise _clash(owner[name], link, reason)
            owner[name] = link
        if link.decides_softmax():
            if decider is not None and decider.softmax != link.softmax:
                reason = "one normalises with softmax, the other does not; leave `softmax` out of "
                raise _clash(decider, link, f"{reason}the one whose functors suit either way")
            decider = link
    return ChainedVariant(links, None if decider is None else decider.softmax)


def _links(variant: Any) -> tuple[Variant, ...]:
    made = as_link(variant)
    return made.links if isinstance(made, ChainedVariant) else (made,)


def _clash(left: Variant, right: Variant, reason: str) -> ChainClash:
    return ChainClash(left=left.name, right=right.name, reason=reason)
