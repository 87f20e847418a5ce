"""The table of numbers by which a kernel turns places on a rank into positions of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from warploom.dsl.graphs.loads import direct_indices
from warploom.dsl.types.axes import check_axes
from warploom.errors import WrongShape
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.inputs.axes import check_captured
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds
from warploom.serving.distributed.placed import FIELD, Whole


def table_of(
    variant: Whole, rank: int, keys_rank: int, *, kv_lens: Any, q_lens: Any, q_rows: Any
) -> Any:
    """What a kernel reads: int32 [requests, num_columns], an array or a tensor as the lengths are.

    Args:
        variant: says which columns there are.
        rank: whose query rows these are.
        keys_rank: whose keys these are.
        kv_lens: [requests] keys of each whole sequence, NumPy or torch.
        q_lens: [requests] query rows of each whole request.
        q_rows: [requests] first row of each among the rows of all requests.
    """
    columns = [kv_lens, q_lens, q_rows]
    if variant.queries is not None:
        columns += variant.queries.columns(q_lens, rank)
    if variant.keys is not None:
        columns += variant.keys.columns(kv_lens, keys_rank)
    if isinstance(kv_lens, torch.Tensor):
        return torch.stack([column.to(torch.int32) for column in columns], 1)
    return np.stack(columns, 1).astype(np.int32)


class Placement:
    """How a wrapper is given its table at each plan.

    A mask's table comes from the host, where its numbers sharpen the plan; the wrapper keeps the
    copy that kernels read. One that no mask reads, or that is made on the device, lies in memory of
    its own that stays, so that CUDA graphs find it.

    Args:
        wrapper: of a `Whole` variant.
        bounds: those of the wrapper, if it has any.
    """

    def __init__(self, wrapper: AttentionWrapper, bounds: Bounds | None) -> None:
        self._wrapper, self._requests = wrapper, bounds.max_requests if bounds else None
        self._memory: torch.Tensor | None = None

    @contextmanager
    def given(self, table: Any) -> Iterator[dict[str, Any]]:
        """What `plan`, in the block, is given for the table; nothing if no functor reads it.

        A plan that is refused leaves the memory as it was: graphs of the last one read it.
        """
        if FIELD not in self._wrapper.spec.variant.input_names:
            yield {}
            return
        is_on_host = isinstance(table, np.ndarray)
        if is_on_host and FIELD in self._wrapper.mask_tensors:
            yield {FIELD: table}
            return
        rows = torch.as_tensor(table)
        memory = self._memory_for(rows)
        if not is_on_host:  # a device's planner reads it, and refuses nothing by an error
            memory[: len(rows)].copy_(rows)
        yield {FIELD: memory}
        if is_on_host:  # its numbers were of no interest to the plan
            memory[: len(rows)].copy_(rows)
        self._memory = memory

    def _memory_for(self, rows: torch.Tensor) -> torch.Tensor:
        if self._memory is not None and len(rows) <= len(self._memory):
            return self._memory
        size = (max(len(rows), self._requests or 1), rows.shape[1])
        return torch.zeros(size, dtype=torch.int32, device=self._wrapper.device)


def check_sizes(variant: Whole, given: dict[str, Any], heads: Any, q: Any, kv: Any) -> None:
    """Refuse tensors of fields that end before the positions of whole sequences do.

    The wrapper of a rank knows the rank's lengths alone.

    Args:
        variant: what the rank runs.
        given: values of its fields.
        heads: head counts.
        q, kv: int arrays [requests], lengths of whole sequences.

    Raises:
        WrongShape: names the tensor and the size that it must have.
    """
    _, traced = traced_once(variant.inner)
    longest_q, longest = int(q.max(initial=0)), int(kv.max(initial=0))
    sizes = {
        "batch": len(kv), "kv_pos": longest, "q_pos": longest, "q_idx": longest_q,
        "q_row": int(q.sum()), "q_head": heads.num_q, "kv_head": heads.num_kv,
    }  # fmt: skip
    direct = direct_indices(traced)
    values = {**variant.inner.inputs(), **given}
    for field in traced.tensors:
        shape = tuple(getattr(values.get(field.name), "shape", ()))
        if not shape:
            continue  # the wrapper asks for it
        if len(shape) != len(field.axes):
            expected = f"{len(field.axes)} dimensions"
            raise WrongShape(name=field.name, got=shape, expected=expected)
        if field.captured:
            check_captured(field, shape, direct[field.name], sizes)
        else:
            check_axes(field, shape, sizes)
