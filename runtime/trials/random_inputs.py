"""Values for the fields of a variant, where a trial needs some and nobody gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.dsl.graphs.loads import direct_indices, needed_sizes
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import OutputField, TensorField
from warploom.dsl.variants.variant import Variant
from warploom.errors import MissingInput
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.inputs.axes import lane_sizes
from warploom.runtime.inputs.values import as_input, extended
from warploom.runtime.trials.case import Case


def random_inputs(
    variant: Variant, case: Case, rng: np.random.Generator, given: set[str]
) -> dict[str, Any]:
    """Values for fields that are read and not given: tensors of the sizes that their axes ask for.

    Outputs are NaN everywhere. Bound scalars keep their value. Bound tensors with a dimension of no
    axis keep theirs, repeated or cut to the heads, lanes and lengths of the batch; those that a
    plain function captured are continued with their last entries to its lengths. A dimension of no
    axis that a position indexes as it is gets that position's length.

    Raises:
        MissingInput: the size of an unbound tensor is unknown.
    """
    _, traced = traced_once(variant)
    bound = variant.inputs()
    lanes = lane_sizes(traced, case.setup.head_dim, case.setup.head_dim_v)
    direct = direct_indices(traced)
    values: dict[str, Any] = {}
    for tensor in traced.tensors:
        if tensor.name in given:
            continue
        sizes = {**_sizes(case), **lanes.get(tensor.name, {})}
        if tensor.name in bound and None in tensor.axes and not tensor.captured:
            values[tensor.name] = _fitted(tensor, bound[tensor.name], sizes)
            continue
        least = needed_sizes(direct[tensor.name], sizes)
        if tensor.captured:
            values[tensor.name] = extended(as_input(tensor, bound[tensor.name]), least)
            continue
        axes = zip(tensor.axes, least, strict=True)
        shape = tuple(size if axis is None else sizes[axis] for axis, size in axes)
        for dim, size in enumerate(shape):
            if tensor.axes[dim] is None and size == 0:
                raise _unknown_size(variant, tensor, dim)
        values[tensor.name] = _random_tensor(tensor, shape, case, rng)
    for scalar in traced.scalars:
        if scalar.name not in (*given, *bound) and scalar.default is None:
            values[scalar.name] = _draw(scalar.dtype, (), case, rng).item()
    return values


def _fitted(field: TensorField, bound: Any, sizes: Mapping[str, int]) -> torch.Tensor:
    """A bound tensor for a batch of other sizes: its entries, over and over along each axis."""
    tensor = as_input(field, bound)
    for dim, axis in enumerate(field.axes):
        have = tensor.shape[dim]
        if axis is not None and have not in (0, sizes[axis]):
            index = torch.arange(sizes[axis], device=tensor.device) % have
            tensor = tensor.index_select(dim, index)
    return tensor


def _unknown_size(variant: Variant, field: TensorField, dim: int) -> MissingInput:
    return MissingInput(
        variant=variant.name,
        name=field.name,
        expected=f"of {field.dtype.name}: dimension {dim} has no axis and a computed index, so its "
        f"size is unknown; give check() inputs=lambda case, rng: {{{field.name!r}: ...}}, or bind "
        "a tensor when the variant is made",
    )


def _random_tensor(
    field: TensorField, shape: tuple[int, ...], case: Case, rng: np.random.Generator
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, field.dtype.name)
    if isinstance(field, OutputField):
        return torch.full(shape, math.nan, dtype=dtype)  # so that it shows what nobody writes
    return torch.from_numpy(_draw(field.dtype, shape, case, rng)).to(dtype)


def _sizes(case: Case) -> dict[str, int]:
    """Length of a dimension of each axis."""
    longest = max((*case.kv_lens, 1))
    return {
        "batch": len(case.q_lens),
        "q_head": case.num_q_heads,
        "kv_head": case.num_kv_heads,
        "kv_pos": longest,
        "q_pos": longest,
        "q_row": max(sum(case.q_lens), 1),
        "q_idx": max((*case.q_lens, 1)),
    }


def _draw(
    dtype: DType, shape: tuple[int, ...], case: Case, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    if dtype.kind is Kind.FLOAT:
        return rng.standard_normal(shape, dtype=np.float32)
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, min(max((*case.kv_lens, 1)) + 1, 1 << (8 * dtype.bytes - 1)), shape)
