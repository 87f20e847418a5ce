"""Kernels that transform keys before attention does: what decides one, and its source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.codegen.abi import ParamField, input_fields, ordered, struct_text
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.lowering.split import lane_parts
from warploom.codegen.render import config_struct, environment, short_dims, short_dtypes
from warploom.codegen.source import KernelSource
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import AttentionSpec, TracedVariant

THREADS = 128
_MOST_HEADS = 4  # of one token under way at a time; more take too many registers

_POINTERS = (
    ("const void*", "k", "keys"),
    ("void*", "prepared", "the same, transformed"),
    ("const int*", "segments", "Segment records, in the order of their keys"),
)
# Counted in elements. Both begin at block 0 (dense: a batch entry; else there is one), token 0.
STRIDES = tuple(
    f"{tensor}_{axis}_stride" for tensor in ("k", "prepared") for axis in ("block", "token", "head")
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
class PrepareSpec:
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

    @classmethod
    def of(cls, spec: AttentionSpec, num_kv_heads: int) -> PrepareSpec:
        """For keys of attention with so many heads."""
        variant = only_hooks(spec.variant, ("key_transform",))
        heads = math.gcd(num_kv_heads, _MOST_HEADS)
        return cls(variant, spec.head_dim_qk, spec.dtype, heads)


def prepare_fields(spec: PrepareSpec) -> tuple[ParamField, ...]:
    """All members of the kernel's `Params`, in storage order."""
    fields = [ParamField(*row) for row in _POINTERS]
    fields += [ParamField("long long", name, "elements") for name in STRIDES]
    fields += [ParamField("int", name, meaning) for name, meaning in _NUMBERS]
    return ordered([*fields, *input_fields(spec.variant)])


def prepare_launch() -> LaunchShape:
    """What a launch needs; the grid is what the device holds at once."""
    return LaunchShape(THREADS, 0, 0)


def render_prepare(spec: PrepareSpec, plan_structs: str) -> KernelSource:
    """CUDA source of the kernel.

    Args:
        spec: what it is compiled for.
        plan_structs: C text of the plan records (`scheduler.layout.c_structs()`).
    """
    template = "prepare.cu.j2"
    name = f"prepare_{spec.dtype.name}_d{spec.head_dim}_h{spec.heads}"
    config: dict[str, str | int | bool] = {
        "element": spec.dtype.c_name,
        "head_dim_qk": spec.head_dim,
        "heads": spec.heads,
        **_readings(spec.variant.hooks["key_transform"]),
    }
    context = {
        "title": f"// {name}: {spec.variant.name}\n"
        f"// rendered by warploom from templates/{template}",
        "plan_structs": plan_structs,
        "params_struct": struct_text(prepare_fields(spec)),
        "variant_struct": variant_struct(spec.variant, "cuda"),
        "config_struct": config_struct(config),
        "entry": "warploom_kernel",
        "threads": THREADS,
    }
    text = environment().get_template(template).render(context)
    labels = (
        ("kind", "prepare"),
        ("variant", spec.variant.name),
        ("dtype", short_dtypes(spec.dtype, spec.dtype)),
        ("head_dim", short_dims(spec.head_dim, spec.head_dim)),
    )
    return KernelSource(name, text, "cuda", labels=labels)


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
