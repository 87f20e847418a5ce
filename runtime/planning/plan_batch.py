"""From the arguments of `plan` to a batch: on the device, measured natively, or by NumPy.

The device plans where bounds are declared and leave less than four query tiles for each request,
storage is paged or ragged, all index arrays are contiguous int32 tensors on the wrapper's device,
and the plan need not be batch invariant. Its plan is the host's, bit for bit. Requests that a
replay of a captured plan does not need have no rows and no keys.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.dsl.types.formats import KVFormat
from warploom.errors import ArgumentError
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Batch
from warploom.runtime.planning.planner import Planner

_REMEDY = "Call it before or after, or declare bounds and give lengths that lie on the device."


def batch_of(
    arguments: tuple[Any, ...],
    kv_lens: Any,
    q_rows: int | None,
    kv_format: KVFormat,
    planner: Planner | None,
    device: torch.device,
) -> Batch:
    """Check the plan arguments and bring them into the form that suits them best.

    Args:
        arguments: qo_indptr, kv_indptr, kv_indices and last_page_len.
        kv_lens: of block-sparse formats.
        q_rows: rows that q will have, or None.
        kv_format: the wrapper's.
        planner: of a compiled back end.
        device: the wrapper's.

    Raises:
        Those of `make_batch`.
        ArgumentError: the batch has not q_rows rows.
        ForbiddenUnderCapture: the current stream is being captured, and the host must plan.
    """
    planner = planner if kv_lens is None else None
    batch: Batch | None = None
    if planner is not None:
        batch = planner.lengths_on_device(arguments, q_rows)
    if batch is not None:
        return batch
    refuse_under_capture(device, "plan() was called", _REMEDY)
    if planner is not None:
        batch = planner.measure(arguments)
    if batch is None:
        qo, kv, indices, last = arguments
        batch = make_batch(kv_format, qo, kv, indices, last, kv_lens)
    if q_rows not in (None, batch.q_rows):
        raise ArgumentError(name="q_rows", reason=f"is {q_rows}; the batch has {batch.q_rows}")
    return batch
