"""A variant of the user's in place of what transformers says of a layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from warploom.dsl.variants.variant import Variant, as_variant
from warploom.engines.layers import AttentionLayer, fault_of, likeness, tells_requests_apart
from warploom.errors import ArgumentError
from warploom.runtime.calls.huggingface import KeyPadding, reads_sink

Choice = Callable[[AttentionLayer], "Variant | type[Variant] | None"]


@dataclass(frozen=True)
class OwnVariant:
    """What a layer computes.

    Attributes:
        variant: as it was chosen.
        beside_padding: the same where keys are padded.
        reads_sink: it takes the model's sinks.
        tells_requests_apart: see `engines.layers.tells_requests_apart`.
        key: equal for layers that one plan serves.
    """

    variant: Variant
    beside_padding: Variant
    reads_sink: bool
    tells_requests_apart: bool
    key: Hashable


class OwnVariants:
    """Those of all layers, each of which the user is asked for once."""

    def __init__(self, choose: Choice) -> None:
        """Take a function; raises ArgumentError for anything else."""
        if not callable(choose) or isinstance(choose, (Variant, type)):
            reason = f"is {choose!r}; expected a function that is given a layer and returns one"
            raise ArgumentError(name="variant", reason=reason)
        self._choose = choose
        self._made: WeakKeyDictionary[Any, OwnVariant | None] = WeakKeyDictionary()

    def of(self, module: Any, layer: AttentionLayer) -> OwnVariant | None:
        """That of a layer; None if the model's own is wanted.

        Args:
            module: transformers' layer.
            layer: the same, described.

        Raises:
            ArgumentError: the function returned something else. What it raises is passed on.
        """
        if module not in self._made:
            self._made[module] = self._asked(layer)
        return self._made[module]

    def _asked(self, layer: AttentionLayer) -> OwnVariant | None:
        made = self._choose(layer)
        if made is None:
            return None
        fault = fault_of(made, layer)
        if fault is not None:
            reason = f"for {layer.name} {fault.reason}; expected {fault.expected}"
            raise ArgumentError(name="variant", reason=reason)
        variant = as_variant(made)
        return OwnVariant(
            variant=variant,
            beside_padding=variant & KeyPadding(),
            reads_sink=reads_sink(variant),
            tells_requests_apart=tells_requests_apart(variant),
            key=likeness(variant),
        )
