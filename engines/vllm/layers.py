"""A layer as vLLM describes it: with the type of its cache."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.dsl.library.kv_scale import KVScale
from warploom.dsl.variants.variant import Variant
from warploom.engines.layers import AttentionLayer, chained

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
class Layer(AttentionLayer):
    """What is given to whoever chooses a variant for a layer; its name is vLLM's.

    Attributes:
        cache_dtype: vLLM's name for the type of its cache.
    """

    cache_dtype: str = "auto"

    @property
    def kv_dtype(self) -> str | None:
        """Element type of the cache, if it is not the model's."""
        return CACHE_TYPES[self.cache_dtype]

    @property
    def has_scales(self) -> bool:
        """The cache holds multiples of scales, which the back end applies before all else."""
        return self.cache_dtype.startswith("fp8")


def scaled(layer: Layer, variant: Variant) -> Variant:
    """The variant on keys and values that are multiples of the cache's scales."""
    return chained([KVScale(), variant]) if layer.has_scales else variant
