"""Arguments of `attention` beside q, k and v: lengths, and values of the variant's fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from warploom.dsl.graphs.loads import Q_IDX
from warploom.dsl.types.ir import Node, substitute, var, walk
from warploom.dsl.types.spec import OutputField, ScalarField, TensorField, TracedVariant
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, UnknownInput, WrongShape
from warploom.notices import RowsBeforeKeys, warn_once
from warploom.runtime.calls.sizes import Sizes
from warploom.runtime.formats.lists import refuse_lengths
from warploom.runtime.inputs.aux_outputs import AuxOutput, Requested
from warploom.runtime.inputs.copies import DeviceCopies, refuse_copying
from warploom.runtime.inputs.missing import read_values
from warploom.runtime.inputs.outputs import as_given
from warploom.runtime.inputs.values import as_input, as_seen_input, checked_scalar
from warploom.runtime.operators import custom_op
from warploom.runtime.tensors.tensors import as_seen, host_int32

ARGUMENTS = (
    "variant", "sm_scale", "return_lse", "return_aux", "layout", "kv_lens", "lse_base", "backend",
)  # fmt: skip
_copies = DeviceCopies()


def read_inputs(given: Variant, traced: TracedVariant, inputs: dict[str, Any]) -> dict[str, Any]:
    """The values that the variant reads; raises UnknownInput for a name that is no field."""

    def unknown(name: str) -> UnknownInput:
        fields = [*traced.input_names, *traced.unread]
        return UnknownInput.of(given.name, name, fields, ARGUMENTS, "attention()")

    return read_values(traced, inputs, unknown)


def values_of(
    values: dict[str, Any], traced: TracedVariant, inputs: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Values of the fields that the kernel reads: given to the call, or else bound before."""
    scalars = [field for field in traced.scalars if field.name in values]
    # as numbers: keys of plans hold them, and a tensor could have another value by then
    found: dict[str, Any] = {x.name: checked_scalar(x, values[x.name]) for x in scalars}
    for field in traced.tensors:
        if field.name in inputs:
            found[field.name] = inputs[field.name]
        elif field.name in values:
            found[field.name] = _on_device(field, values[field.name], device)
    return found


def _on_device(field: TensorField, bound: Any, device: torch.device) -> torch.Tensor:
    """A bound value on the kernel's device; a host tensor is copied once.

    Outputs are not copied, since the caller reads them.
    """
    if isinstance(field, OutputField):
        return as_given(field, bound)
    if device.type != "cpu" and isinstance(bound, torch.Tensor) and bound.device.type == "cpu":
        return _copies(bound, device, field.dtype, lambda: as_input(field, bound))
    tensor = as_input(field, bound)
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor
    refuse_copying(device)
    return tensor.to(device)


def through_operator(
    traced: TracedVariant,
    variant: Variant | type[Variant] | None,
    given: tuple[Any, Any, Any],
    options: tuple[float | None, bool, str, str, str | None],
    lens: torch.Tensor | None,
    inputs: Mapping[str, Any],
    return_aux: Requested | None,
) -> custom_op.Result | tuple[torch.Tensor, AuxOutput]:
    """`attention` through the custom operator: its tensors may be stand-ins, or torch records it.

    Args:
        traced: the variant's graphs.
        variant: the variant, as given.
        given: q, k and v.
        options: sm_scale, return_lse, layout, lse_base and backend.
        lens: kv_lens.
        inputs: values of fields.
        return_aux: the call's argument.
    """
    q, k, v = (as_seen(x, name) for name, x in zip("qkv", given, strict=True))
    fields: dict[str, ScalarField | TensorField] = {field.name: field for field in traced.scalars}
    fields |= {field.name: field for field in traced.tensors}
    seen = {name: as_seen_input(fields[name], value) for name, value in inputs.items()}
    return custom_op.compiled_attention(q, k, v, variant, *options, lens, seen, return_aux)


def check_lengths(
    given: Variant,
    traced: TracedVariant,
    mask_tensors: frozenset[str],
    values: Mapping[str, Any],
    sizes: Sizes,
    lens: np.ndarray[Any, Any] | None,
    layout: str,
) -> None:
    """Let the variant refuse tensors of the mask that are too small, if the host has them.

    Raises:
        ArgumentError: the variant refuses a tensor, or it would accept it in the other layout.
    """
    if not given.checks_lengths:
        return
    known: dict[str, np.ndarray[Any, Any]] = {}
    for field in traced.tensors:
        if field.name in mask_tensors and field.name in values:
            tensor = as_input(field, values[field.name])
            if tensor.device.type == "cpu":  # NumPy does not have all float types
                tensor = tensor.float() if tensor.is_floating_point() else tensor
                known[field.name] = tensor.numpy()

    def check(rows: int, keys: int) -> None:
        kv_lens = np.full(sizes.batch, keys, np.int32) if lens is None else lens
        given.check_lengths(known, np.full(sizes.batch, rows, np.int32), kv_lens)

    try:
        check(sizes.rows, sizes.keys)
    except ArgumentError as error:
        if sizes.q_heads <= sizes.rows:  # the layout is probably right
            raise
        try:
            check(sizes.q_heads, sizes.kv_heads)
        except ArgumentError:
            raise error from None
        other = "HND" if layout == "NHD" else "NHD"
        reason = (
            f"is {layout!r}, in which q and k have {sizes.rows} rows and {sizes.keys} keys; with "
            f"layout={other!r} they have {sizes.q_heads} and {sizes.kv_heads}, as the mask"
        )
        raise ArgumentError(name="layout", reason=reason) from error


def checked_lens(kv_lens: Any, sizes: Sizes, traced: TracedVariant) -> np.ndarray[Any, Any]:
    """`kv_lens` of `attention` on the host, each from 0 to the number of keys.

    Warns if rows are positioned before all keys and the variant reads positions of queries.
    """
    lens = host_int32(kv_lens, "kv_lens")
    if len(lens) != sizes.batch:
        raise WrongShape(name="kv_lens", got=tuple(lens.shape), expected=f"({sizes.batch},)")
    expected = f"0 to {sizes.keys}, since k has {sizes.keys} key{'' if sizes.keys == 1 else 's'}"
    refuse_lengths((lens < 0) | (lens > sizes.keys), lens, "kv_lens", expected)
    short = (lens > 0) & (lens < sizes.rows)
    if short.any() and _read_q_pos(traced.roots):
        at = int(short.argmax())
        text = (
            f"kv_lens[{at}] is {lens[at]}, and there are {sizes.rows} rows: queries stand at the "
            f"end of the keys that count, so the first {sizes.rows - lens[at]} rows lie before all "
            "keys. If the batch is padded behind its tokens, leave kv_lens out under a causal "
            "mask, for it hides the padding anyway; or give the batch without padding, to "
            "AttentionWrapper(kv_format=Ragged())."
        )
        warn_once("kv_lens", text, RowsBeforeKeys)
    return lens


@lru_cache(maxsize=64)
def _read_q_pos(roots: tuple[Node, ...]) -> bool:
    """Whether a graph depends on `q_pos` other than through a row's number in its request."""
    placed = (substitute(root, {Q_IDX: var("q_len")}) for root in roots)
    return any(found.op == "var" and found.attr == "q_pos" for found in walk(*placed))
