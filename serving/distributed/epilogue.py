"""A variant's output transform after the states of all ranks have become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from warploom.dsl.types.formats import Ragged
from warploom.dsl.variants.variant import Variant
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.operators.custom_op import wanting
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds
from warploom.serving.distributed.layouts import Layout
from warploom.serving.distributed.placed import Epilogue, Placed
from warploom.serving.distributed.placement import Placement

_DIM = 16  # of queries and keys that nobody reads
_KEPT = ("device", "backend", "cuda_graph", "sm_limit", "batch_invariant")


class OutputTransform:
    """Runs an `Epilogue` over merged states.

    Args:
        variant: what the ranks run.
        local: the wrapper that runs it.
        queries: where this rank's query rows lie.
        is_batched: rows are counted within a request, as in dense tensors.
        options: those that the wrapper was made with.

    Attributes:
        wrapper: which applies it.
    """

    def __init__(
        self,
        variant: Placed,
        local: AttentionWrapper,
        queries: Layout | None,
        is_batched: bool,
        options: Mapping[str, Any],
    ) -> None:
        heads = local.heads
        self._group_size, self._softmax = heads.group_size, variant.softmax
        bounds = options.get("bounds")
        if bounds is not None:
            keys = bounds.max_q_rows * heads.group_size
            bounds = Bounds(bounds.max_requests, bounds.max_q_rows, keys)
        self.wrapper = AttentionWrapper(
            Epilogue(variant.inner, queries, is_batched),
            kv_format=Ragged(),
            num_q_heads=heads.num_q,
            num_kv_heads=heads.num_kv,
            head_dim=_DIM,
            head_dim_v=local.spec.head_dim_v,
            dtype=local.spec.dtype,
            bounds=bounds,
            **{name: options[name] for name in _KEPT if name in options},
        )
        self._dtype: torch.dtype = getattr(torch, local.spec.dtype.name)
        self._placement = Placement(self.wrapper, bounds)

    def plan(self, qo_indptr: Any, table: Any, q_rows: int | None, inputs: dict[str, Any]) -> None:
        """Plan the rows of a batch; arguments as of the wrapper before."""
        keys = torch.as_tensor(qo_indptr) * self._group_size
        with self._placement.given(table) as placed:
            self.wrapper.plan(qo_indptr, keys, q_rows=q_rows, **inputs, **placed)

    def run(
        self, merged: torch.Tensor, lse: torch.Tensor, axis: int, inputs: dict[str, Any]
    ) -> torch.Tensor:
        """The transformed output, shaped as the merged one.

        Args:
            merged: [..., rows, heads, head_dim], or with the heads at another axis.
            lse: alike, without head_dim.
            axis: of the heads.
            inputs: values of the variant's fields.
        """
        heads_last = merged.movedim(axis, -2)
        num_kv, dim = self.wrapper.heads.num_kv, merged.shape[-1]
        values = heads_last.reshape(-1, num_kv, self._group_size, dim).to(self._dtype)
        values = values.transpose(1, 2).reshape(-1, num_kv, dim)
        keys = values.new_zeros((1, num_kv, _DIM)).expand(len(values), num_kv, _DIM)
        q = values.new_zeros((len(values) // self._group_size, self.wrapper.heads.num_q, _DIM))
        sums = lse.movedim(axis, -1).reshape(-1, self.wrapper.heads.num_q).contiguous()
        given = {**inputs, "merged_lse": sums} if self._softmax else inputs
        out: torch.Tensor = self.wrapper.run(q, (keys.contiguous(), values), **given)
        return out.reshape(heads_last.shape).movedim(-2, axis)


def learnt_of(
    local: AttentionWrapper,
    epilogue: OutputTransform | None,
    given: Sequence[Any],
    inputs: Mapping[str, Any],
) -> list[torch.Tensor]:
    """What a run reads whose gradient may be asked for.

    Args:
        local: the wrapper that attends.
        epilogue: what follows it, if anything does.
        given: queries, keys and values of the run.
        inputs: values of the variant's fields for it; wrappers know those that they keep.
    """
    wrappers = [local] if epilogue is None else [local, epilogue.wrapper]
    return [*wanting(given), *(x for wrapper in wrappers for x in wrapper.learnt(inputs))]


def has_output_transform(variant: Variant) -> bool:
    """Whether the variant changes the output of a whole row."""
    return "output_transform" in traced_once(variant)[1].hooks
