"""Checks of tensors that functors record values in, which kernels write besides their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from warploom.dsl.types.spec import OutputField, TensorField
from warploom.dsl.variants.outputs import Output
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.args import Geometry, check_apart, check_writable
from warploom.runtime.inputs.values import as_input, refuse_none
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.tensors import as_torch, byte_span


def as_given(field: TensorField, value: Any) -> torch.Tensor:
    """A tensor for a field; only tensors that kernels do not write are copied. See `as_input`.

    Raises:
        WrongStride: elements of an output overlap.
        ArgumentError: an output cannot be written: it is a copy, read-only, or requires a gradient.
        and those of `as_input`.
    """
    if not isinstance(field, OutputField):
        return as_input(field, value)
    refuse_none(field, value)
    tensor = as_torch(value, field.name, shared=True)
    refuse_freed(tensor, field.name, byte_span(tensor))
    check_writable(tensor, field.name)
    return tensor


def given_to_run(field: TensorField, value: Any) -> torch.Tensor:
    """A tensor for a field that `run` was given, and does not convert."""
    if isinstance(field, OutputField):
        return as_given(field, value)
    refuse_none(field, value)
    tensor = as_torch(value, field.name)
    refuse_freed(tensor, field.name, byte_span(tensor))
    return tensor


def type_remedy(field: TensorField, variant: str, got: torch.dtype) -> str:
    """The advice for a tensor whose dtype is not the field's."""
    is_output, expected = isinstance(field, OutputField), f"torch.{field.dtype.name}"
    change = (
        f"Allocate it with dtype={expected}" if is_output else f"Convert it with .to({expected})"
    )
    is_mask = got is torch.bool and field.dtype.name == "uint8"  # a byte may hold eight bools
    if is_mask and field.axes == (None,) and not is_output:  # as in shipped variants: packed bits
        return "Pack a mask with wl.pack_masks."
    if is_mask and not is_output:
        return f"Pack a mask with wl.pack_masks. Where each entry is a number: {change}."
    return f"{change}, or declare the field of {variant} with its dtype."


def check_rows_apart(field: TensorField, geometry: Geometry, batch: Batch | None) -> None:
    """Raise ArgumentError for an output whose axes do not distinguish rows of dense requests."""
    if not isinstance(field, OutputField) or "batch" in field.axes or batch is None:
        return
    if geometry.batched and batch.num_requests > 1:
        reason = "has no 'batch' dimension, and of dense tensors q_row counts each request's rows"
        raise ArgumentError(name=field.name, reason=f"{reason}; add the axis 'batch'")


def check_recorded_apart(
    names: tuple[str, ...],
    kept: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor | None],
) -> None:
    """Refuse outputs whose byte range, first to last, overlaps another tensor of the run.

    Args:
        names: names of the outputs.
        kept: tensors of all runs: inputs, outputs and the workspace.
        given: tensors of fields that this run is given.
        others: q, k, v and the results.

    Raises:
        ArgumentError: two tensors overlap; the message names both.
    """
    fields = {**kept, **given}
    outputs = {name: fields.pop(name) for name in names}
    check_apart(outputs, {**fields, **{k: x for k, x in others.items() if x is not None}})


def check_run_apart(
    names: tuple[str, ...],
    kept: Mapping[str, torch.Tensor],
    given: Mapping[str, Any],
    read: Mapping[str, torch.Tensor],
    written: Mapping[str, torch.Tensor | None],
) -> None:
    """Refuse results and recorded outputs that overlap tensors that the run reads.

    Args:
        names, kept, given: as in `check_recorded_apart`; given outputs may be NumPy arrays.
        read: q, k and v, as the caller gave them.
        written: the results.

    Raises:
        ArgumentError: two tensors overlap; the message names both.
    """
    new = {
        name: as_torch(x, name, shared=True) if name in names else x
        for name, x in given.items()
        if name in names or isinstance(x, torch.Tensor)
    }
    check_apart(written, {**read, **kept, **new})
    if names:
        check_recorded_apart(names, kept, new, {**read, **written})


def recorded_by(variant: Variant | type[Variant]) -> tuple[str, ...]:
    """Names of a variant's outputs."""
    fields = as_variant(variant).fields()
    return tuple(name for name, field in fields.items() if isinstance(field, Output))


def refuse_recording(names: tuple[str, ...]) -> None:
    """Raise ArgumentError for outputs of a call through an operator, which cannot declare them."""
    if names:
        reason = (
            "is written by the kernel, which no graph of torch repeats and no gradient knows of; "
            "call it outside of torch.compile and torch.func, under torch.no_grad()"
        )
        raise ArgumentError(name=names[0], reason=reason)
