"""Sizes that the dimensions of a field's tensor must have for a batch, by axis."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.dsl.graphs.loads import Indices, needed_sizes
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import TensorField, TracedVariant
from warploom.errors import WrongShape
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.args import Geometry
from warploom.scheduler.model.bounds import Bounds

# FlexAttention's names of positions.
_FLEX: dict[str | int, str] = {
    "batch": "b",
    "q_head": "h",
    "q_idx": "q_idx",
    "q_pos": "q_idx",
    "kv_pos": "kv_idx",
}


def axis_sizes(geometry: Geometry, batch: Batch) -> dict[str, int]:
    """Length of each axis for this batch: exact for heads, a minimum for other axes."""
    return {
        "batch": batch.num_requests,
        "q_head": geometry.num_q_heads,
        "kv_head": geometry.num_kv_heads,
        "kv_pos": batch.sizes.max_kv_len,
        "q_pos": batch.sizes.max_kv_len,
        "q_row": batch.q_rows,
        "q_idx": batch.sizes.longest_q,
    }


def lane_sizes(traced: TracedVariant, dim_qk: int, dim_v: int) -> dict[str, dict[str, int]]:
    """Length of axis `lane` of each tensor: that of the longest vector in hooks that read it."""
    sizes: dict[str, dict[str, int]] = {}
    for hook, root in traced.hooks.items():
        long = hook in ("query_transform", "key_transform")
        dim = dim_qk if long else dim_v
        for node in walk(root):
            if node.op == "load":
                known = sizes.setdefault(str(node.attr), {"lane": dim})
                known["lane"] = max(known["lane"], dim)
    return sizes


def reserved_sizes(bounds: Bounds) -> dict[str, int]:
    """The largest length of each axis whose length depends on the batch."""
    return {
        "batch": bounds.max_requests,
        "kv_pos": bounds.max_kv_len,
        "q_pos": bounds.max_kv_len,
        "q_row": bounds.max_q_rows,
        "q_idx": bounds.max_q_rows,
    }


BATCH_AXES = frozenset(reserved_sizes(Bounds(1, 1, 1)))  # axes whose length depends on the batch


def check_captured(
    field: TensorField,
    shape: tuple[int, ...],
    indices: tuple[Indices, ...],
    sizes: Mapping[str, int],
) -> None:
    """Raise WrongShape if a captured tensor ends before the positions that index it."""
    for dim, least in enumerate(needed_sizes(indices, sizes)):
        if shape[dim] < least:
            by = " and ".join(sorted(str(_FLEX.get(i, i)) for i in indices[dim]))
            raise WrongShape(
                name=field.name,
                got=shape,
                expected=f"at least {least} along dimension {dim}, which is indexed by {by}",
            )
