"""`backend="reference"`: the NumPy reading of a variant behind the wrapper's interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.variant import Variant
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.formats.batch import Batch, HostBatch
from warploom.runtime.inputs.args import (
    Geometry,
    check_key_values,
    check_query,
    check_results,
    key_value,
)
from warploom.runtime.inputs.aux_outputs import MaxScores
from warploom.runtime.inputs.axes import axis_sizes
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.outputs import check_run_apart
from warploom.runtime.launching.launch import Run
from warploom.runtime.operators.custom_op import Result, results
from warploom.runtime.tensors.strides import new_result

_Rows = np.ndarray[Any, Any]


class Reference:
    """Runs of one wrapper by the NumPy reading, in place of a `Launcher`."""

    def __init__(self, declared: DeclaredAttention, geometry: Geometry, inputs: Inputs) -> None:
        self._declared, self._geometry, self._inputs = declared, geometry, inputs

    def start(self, run: Run, batch: Batch, max_scores: MaxScores | None) -> Result:
        """Check the tensors of a run, and compute it.

        Args:
            run: its arguments.
            batch: the planned batch.
            max_scores: where to write them, or None.

        Raises:
            Those of `AttentionWrapper.run` for a wrong tensor or input.
        """
        of, geometry, inputs = self._declared, self._geometry, self._inputs
        tensors = (run.q, *key_value(run.kv))
        tops = None if max_scores is None else max_scores.tensor
        check_results(run.out, run.lse, tensors, geometry, batch, tops)
        traced = of.spec.variant
        values = unread_values(of.variant, traced.unread, geometry, batch)
        values |= {**inputs.scalars, **inputs.tensors}
        given = inputs.check_given(run.given)
        values |= given
        written = {"out": run.out, "lse": run.lse, "max_scores": tops}
        check_run_apart(traced.output_names, inputs.tensors, given, run.read, written)
        o, sums, found = run_reference(
            of.variant, batch.on_host, geometry, tensors, values, of.sm_scale
        )
        if max_scores is not None:
            max_scores.put(found)
        if run.out is None:
            o = new_result(run.q, geometry.head_dim_v).copy_(o)
        return results(o, sums * of.lse_scale, run.out, run.lse, run.return_lse)


def unread_values(
    variant: Variant, names: Sequence[str], geometry: Geometry, batch: Batch
) -> dict[str, Any]:
    """Values for fields that no result depends on, but that functors may still read: zeros, or ones
    where a field's own check refuses 0."""
    if not names:
        return {}
    sizes = {**axis_sizes(geometry, batch), "lane": geometry.head_dim_qk}
    fields, found = variant.fields(), dict[str, Any]()
    for name in names:
        axes = getattr(fields[name], "axes", ())
        check = getattr(fields[name], "check", None)
        number = 0.0 if check is None or check(0.0) is None else 1.0
        found[name] = np.full([sizes.get(axis, 1) for axis in axes], number)
    return found


def run_reference(
    variant: Variant,
    batch: HostBatch,
    geometry: Geometry,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: Mapping[str, Any],
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of a batch, segment by segment, in float64.

    Args:
        variant: its functors are called on NumPy arrays.
        batch: lengths and block lists.
        geometry: how tensors are stored.
        tensors: q, k and v.
        inputs: values of the variant's fields.
        sm_scale: factor of q.k.

    Returns:
        Output in q's dtype, natural log-sum-exp and largest scores in float32, laid out as a kernel
        writes them.

    Raises:
        WrongDType, WrongDevice, WrongShape, IndexOutOfRange: a wrong tensor.
    """
    check_query(tensors[0], geometry, batch)
    check_key_values(tensors[1], tensors[2], geometry, batch)
    q = _named(tensors[0], geometry.q_axes, ("batch", "row", "head", "dim"))
    k, v = (_named(x, geometry.kv_axes, ("block", "token", "head", "dim")) for x in tensors[1:])
    o = np.zeros((*q.shape[:-1], geometry.head_dim_v))
    lse, top = (np.full(q.shape[:-1], -math.inf) for _ in range(2))
    for segment in batch.segments:
        entry = int(segment["batch"]) if geometry.batched else 0
        rows = slice(int(segment["q_row"]), int(segment["q_row"]) + int(segment["num_q"]))
        positions, keys = geometry.format.keys_of(segment, batch)
        o[entry, rows], lse[entry, rows] = reference_attention(
            variant,
            q[entry, rows],
            k[keys],
            v[keys],
            batch=int(segment["batch"]),
            sm_scale=sm_scale,
            inputs=inputs,
            kv_positions=positions,
            first_q_idx=int(segment["q_idx"]),
            first_q_row=rows.start,
            q_len=int(segment["q_len"]),
            kv_len=int(segment["kv_len"]),
            max_scores=top[entry, rows],
        )
    wanted = geometry.q_axes
    out = _unnamed(o, ("batch", "row", "head", "dim"), wanted).to(geometry.dtype)
    of_rows = (_unnamed(x, ("batch", "row", "head"), wanted[:-1]).float() for x in (lse, top))
    sums, tops = (x.to(geometry.device) for x in of_rows)
    return out.to(geometry.device), sums, tops


def _named(tensor: torch.Tensor, axes: tuple[str, ...], wanted: tuple[str, ...]) -> _Rows:
    """float64 NumPy array with the wanted axes in order; axes that the tensor lacks get size 1."""
    missing = [axis for axis in wanted if axis not in axes]
    array = tensor.detach().double().cpu().numpy()
    array = array.reshape(*[1] * len(missing), *array.shape)
    order = [*missing, *axes]
    named: _Rows = array.transpose([order.index(axis) for axis in wanted])
    return named


def _unnamed(array: _Rows, axes: tuple[str, ...], wanted: tuple[str, ...]) -> torch.Tensor:
    """The inverse of `_named`: from named axes to the tensor's own."""
    dropped = tuple(i for i, axis in enumerate(axes) if axis not in wanted)
    kept = [axis for axis in axes if axis in wanted]
    moved = array.squeeze(dropped).transpose([kept.index(axis) for axis in wanted])
    return torch.from_numpy(np.ascontiguousarray(moved))
