"""A layer of attention as an engine describes it, and the variant that computes it."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.ir import walk
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.runtime.declaring.structure import traced_once


@dataclass(frozen=True)
class AttentionLayer:
    """What is given to whoever chooses a variant for a layer.

    Attributes:
        name: as the engine calls it, with the layer's number between points or at its end.
        num_q_heads, num_kv_heads: of this rank.
        head_dim: lanes of queries, keys and values.
        sm_scale: factor of q.k.
        is_causal: queries see no key after them; not so in encoders and across to them.
        window: keys that a query sees, its own included; None if all before it. Of layers with a
            window engines keep no other keys.
        soft_cap: bound of the logits, or None.
        alibi_slopes: [num_q_heads], or None.
        has_sinks: the model learned a sink for each query head.
        model: the configuration of the model, as transformers reads it.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    _: KW_ONLY
    is_causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    has_sinks: bool = False
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def index(self) -> int | None:
        """The first number in its name: which layer it is."""
        found = re.search(r"\.(\d+)\.", f".{self.name}.")
        return None if found is None else int(found[1])

    @property
    def variant(self) -> Variant:
        """What the model means: a variant of one's own is best chained to it."""
        parts: list[Variant] = []
        if self.soft_cap:
            parts.append(SoftCap(self.soft_cap))
        if self.alibi_slopes is not None:
            parts.append(Alibi("input"))
        if self.is_causal:
            parts.append(Causal())
        if self.window is not None and self.is_causal:  # windows to both sides come as masks
            parts.append(SlidingWindow(self.window - 1))
        if self.has_sinks:
            parts.append(AttentionSink())
        return chained(parts or [Variant()])


def chained(parts: list[Variant]) -> Variant:
    """One after the other, at least one."""
    made = parts[0]
    for part in parts[1:]:
        made = made & part
    return made


class Fault(NamedTuple):
    """What is wrong with a choice, and what was expected."""

    reason: str
    expected: str


def fault_of(made: object, layer: AttentionLayer) -> Fault | None:
    """Why what was chosen for a layer cannot be its variant, if it cannot."""
    is_class = isinstance(made, type) and issubclass(made, Variant)
    if not (is_class or isinstance(made, Variant)):
        return Fault(f"is {made!r}", "a warploom.Variant, or None")
    unbound = _without_value(as_variant(made), layer)
    if not unbound:
        return None
    values = ", ".join(f"{name}=..." for name in unbound)
    return Fault(f"reads {unbound}, which have no value", f"one made with them, as Mine({values})")


def _without_value(variant: Variant, layer: AttentionLayer) -> list[str]:
    """Fields that a variant reads and that have no value: neither bound, nor the model's own."""
    own = traced_once(layer.variant)[1].input_names
    known = {*own, *variant.inputs()}
    fields = variant.fields()
    read = (name for name in traced_once(variant)[1].input_names if name not in known)
    return [name for name in read if getattr(fields.get(name), "default", None) is None]


def tells_requests_apart(variant: Variant) -> bool:
    """Whether it reads which request of a batch is computed: in an engine's steps that is any."""
    graphs = traced_once(variant)[1].hooks.values()
    return any(node.op == "var" and node.attr == "batch" for one in graphs for node in walk(one))


def likeness(variant: Variant) -> Hashable:
    """Equal for variants that make the same kernel and have the same values bound to them.

    Tensors are told apart by identity, so whoever keeps it keeps the variant, too.
    """
    values = ((name, _value_key(value)) for name, value in sorted(variant.inputs().items()))
    return traced_once(variant)[0], type(variant), tuple(values)


def _value_key(value: object) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value if isinstance(value, (bool, int, float)) else id(value)
