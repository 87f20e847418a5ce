"""What a variant records, as the C++ function that stores it.

It is no part of `logits()`: kernels call it in a step of its own, for elements that exist and are
visible, and give it the logit as the user's functor gets it, scaled. What the two compute alike is
left to the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.lowering.lower import SAFE_AXES, Block
from warploom.dsl.types.ir import Node
from warploom.dsl.types.spec import Record, TensorField, TracedVariant

_SIGNATURE = (
    "void record(const Params& p, const TileInfo& tile, const RowInfo& row, int kv_pos,\n"
    "      float logits)"
)


def record_function(variant: TracedVariant, tensors: Mapping[str, TensorField]) -> str:
    """`Variant::record`, for a variant that records something.

    No index leaves its dimension: queries before the first key have negative positions, and where a
    device plans, nobody has compared sizes with lengths.
    """
    block = Block(tensors)
    roots = [node for record in variant.records for node in (*record.place, record.value)]
    moving = [i for record in variant.records for i in _moving(record).values()]
    texts = dict(zip(roots, block.compute([*roots, *moving]), strict=False))
    for record in variant.records:
        name = f"p.x_{record.output.name}"
        places = [f"{texts[i]} * {name}_s{dim}" for dim, i in enumerate(record.place)]
        inside = [f"is_inside({texts[i]}, {name}_n{dim})" for dim, i in _moving(record).items()]
        block.finish(f"if ({' & '.join(inside)}) {{", record.source)
        block.finish(f"  write_number({name}, {' + '.join(places)}, {texts[record.value]});")
        block.finish("}")
    return "\n".join(
        [
            "  static constexpr bool kRecords = true;",
            f"  WL_FN static {_SIGNATURE} {{",
            *block.statements,
            "  }",
        ]
    )


def _moving(record: Record) -> dict[int, Node]:
    """Indices that nobody has checked before, by axis."""
    axes = enumerate(zip(record.output.axes, record.place, strict=True))
    return {dim: index for dim, (axis, index) in axes if axis not in SAFE_AXES}
