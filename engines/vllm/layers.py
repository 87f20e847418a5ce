"""A layer of attention as vLLM describes it, and the variant that computes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.kv_scale import KVScale
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.variants.variant import Variant

# what vLLM calls types of caches -> the element type, None for the model's own
CACHE_TYPES: dict[str, str | None] = {
    "auto": None,
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class Layer:
    """What is given to whoever chooses a variant for a layer.

    Attributes:
        name: as in vLLM, such as `model.layers.3.self_attn.attn`.
        num_q_heads, num_kv_heads: of this rank.
        head_dim: lanes of queries, keys and values.
        sm_scale: factor of q.k.
        window: keys that a query sees, its own included; None if all before it. Of layers with a
            window vLLM keeps no other keys.
        soft_cap: bound of the logits, or None.
        alibi_slopes: [num_q_heads], or None.
        has_sinks: the model learned a sink for each query head.
        cache_dtype: vLLM's name for the type of its cache.
        model: the configuration of the model, as transformers reads it.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    has_sinks: bool = False
    cache_dtype: str = "auto"
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def index(self) -> int | None:
        """The first number in its name: which layer it is."""
        found = re.search(r"\.(\d+)\.", f".{self.name}.")
        return None if found is None else int(found[1])

    @property
    def kv_dtype(self) -> str | None:
        """Element type of the cache, if it is not the model's."""
        return CACHE_TYPES[self.cache_dtype]

    @property
    def has_scales(self) -> bool:
        """The cache holds multiples of scales, which the back end applies before all else."""
        return self.cache_dtype.startswith("fp8")

    @property
    def variant(self) -> Variant:
        """What the model means: a variant of one's own is best chained to it."""
        parts: list[Variant] = []
        if self.soft_cap:
            parts.append(SoftCap(self.soft_cap))
        if self.alibi_slopes is not None:
            parts.append(Alibi("input"))
        parts.append(Causal())
        if self.window is not None:
            parts.append(SlidingWindow(self.window - 1))
        if self.has_sinks:
            parts.append(AttentionSink())
        return _chained(parts)


def scaled(layer: Layer, variant: Variant) -> Variant:
    """The variant on keys and values that are multiples of the cache's scales."""
    return _chained([KVScale(), variant]) if layer.has_scales else variant


def _chained(parts: list[Variant]) -> Variant:
    made = parts[0]
    for part in parts[1:]:
        made = made & part
    return made
