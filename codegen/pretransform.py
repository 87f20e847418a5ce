"""Kernels that transform keys before attention does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.lowering.split import lane_parts
from warploom.codegen.render import Config
from warploom.codegen.vector_kinds import VectorSpec, vector_fields
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import AttentionSpec, TracedVariant

_MOST_HEADS = 4  # of one token under way at a time; more take too many registers

_POINTERS = (
    ("const void*", "k", "keys"),
    ("void*", "pretransformed", "the same, transformed"),
    ("const int*", "segments", "Segment records, in the order of their keys"),
)
# Counted in elements. Both begin at block 0 (dense: a batch entry; else there is one), token 0.
STRIDES = tuple(
    f"{tensor}_{axis}_stride"
    for tensor in ("k", "pretransformed")
    for axis in ("block", "token", "head")
)
_NUMBERS = (
    ("num_segments", "segments"),
    ("num_blocks", "batch entries if dense, else 1"),
    ("num_tokens", "of each block"),
    ("num_q_heads", "query heads, for functors"),
    ("num_kv_heads", "key/value heads"),
)
POINTERS = tuple(name for _, name, _ in _POINTERS)
COUNTS = tuple(name for name, _ in _NUMBERS[:3])


@dataclass(frozen=True)
class PretransformSpec(VectorSpec):
    """Everything such a kernel is compiled for.

    Attributes:
        variant: the key transform of the traced variant, and no other hook.
        head_dim: length of key vectors.
        dtype: of keys, before and after.
        heads: of a token that are worked on together.
    """

    variant: TracedVariant
    head_dim: int
    dtype: DType
    heads: int

    kind = "pretransform"
    own_fields = vector_fields(_POINTERS, STRIDES, _NUMBERS)

    @classmethod
    def of(cls, spec: AttentionSpec, num_kv_heads: int) -> PretransformSpec:
        """For keys of attention with so many heads."""
        variant = only_hooks(spec.variant, ("key_transform",))
        heads = math.gcd(num_kv_heads, _MOST_HEADS)
        return cls(variant, spec.head_dim_qk, spec.dtype, heads)

    @property
    def name(self) -> str:
        return f"pretransform_{self.dtype.name}_d{self.head_dim}_h{self.heads}"

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    @property
    def config(self) -> Config:
        return {
            "element": self.dtype.c_name,
            "head_dim_qk": self.head_dim,
            "heads": self.heads,
            **_readings(self.variant.hooks["key_transform"]),
        }


def _readings(transform: Node) -> dict[str, bool]:
    """What need not be worked out for each vector.

    keeps_states: what is kept of a lane is the same for all keys. reads_head: keys of two heads at
    one position are transformed in different ways.
    """
    kept = {found.attr for found in walk(*lane_parts(transform)) if found.op == "var"}
    read = {found.attr for found in walk(transform) if found.op == "var"}
    return {
        "keeps_states": kept <= {"lane", "head_dim"},
        "reads_head": "kv_head" in read,
    }
