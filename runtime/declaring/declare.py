"""Checks of a user's declaration, which make an `AttentionSpec` of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from warploom import env
from warploom.dsl.types.dtypes import ATTENTION_DTYPES, NARROW_DTYPES, DType, dtype, meant
from warploom.dsl.types.dtypes import kv_dtype as stored_dtype
from warploom.dsl.types.formats import KVFormat, Ragged
from warploom.dsl.types.limits import MAX_HEADS
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.errors import ArgumentError, BadFormat, BadHeadDim, UnsupportedSpec
from warploom.runtime.formats.base import Format
from warploom.runtime.inputs.aux_outputs import check_has_scores
from warploom.runtime.inputs.values import fits_float32
from warploom.scheduler.model.bounds import Bounds

_LSE_SCALE = {"e": 1.0, "2": math.log2(math.e)}


def as_format(kv_format: Any) -> KVFormat:
    """The format itself; `Ragged()` for None.

    Raises:
        BadFormat: a class or a name was given in place of an instance.
    """
    if kv_format is None:
        return Ragged()
    if isinstance(kv_format, KVFormat):
        return kv_format
    shown = kv_format.__name__ if isinstance(kv_format, type) else repr(kv_format)
    raise BadFormat(
        what=f"kv_format={shown}", expected="an instance, such as warploom.Paged(page_size=16)"
    )


def check_bounds(bounds: Any, kv_format: Format[Any]) -> None:
    """Refuse bounds that no batch, or no batch of an indexed format, can satisfy.

    Raises:
        ArgumentError: `bounds` is no `Bounds`, or has no room for requests, rows, or the list of
            blocks.
    """
    if not isinstance(bounds, Bounds):
        reason = f"{bounds!r} is no Bounds; give warploom.Bounds(max_requests=..., ...)"
        raise ArgumentError(name="bounds", reason=reason)
    for name in ("max_requests", "max_q_rows"):  # `Bounds.of` an empty batch has 0 of both
        if getattr(bounds, name) == 0:
            reason = "is 0, which admits no query; give what the largest batch will have"
            raise ArgumentError(name=f"Bounds.{name}", reason=reason)
    most = None if bounds.max_blocks else kv_format.most_blocks(bounds)
    if most is not None and most[1]:
        reason = (
            f"is 0, and {kv_format.name} reads a list of blocks. "
            f"{most[0]} = {most[1]} is enough for every batch"
        )
        raise ArgumentError(name="Bounds.max_blocks", reason=reason)


def make_spec(
    traced: TracedVariant,
    head_dim: int,
    head_dim_v: int | None,
    element: str | DType | torch.dtype,
    kv_format: KVFormat,
    device: torch.device,
    kv_dtype: str | DType | torch.dtype | None = None,
    max_scores: bool = False,
) -> AttentionSpec:
    """Check the declaration, and make its spec.

    Raises:
        BadHeadDim: a head dimension is no multiple of 8 from 8 to 256, or of 16 for 8-bit keys and
            values on CUDA.
        UnsupportedSpec: attention, or this device's back end, does not compute in the dtype, or
            largest scores are declared for a variant without softmax.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        checked_count(name, value)
        if value % 8 or not 8 <= value <= 256:
            raise BadHeadDim(name=name, value=value, multiple=8)
    # one kernel serves both layouts, since it reads strides from its parameters
    storage = replace(kv_format, layout="NHD")
    computed = _element(element, device)
    stored = None if kv_dtype is None else _stored(kv_dtype, computed)
    spec = AttentionSpec(
        traced, int(head_dim), int(head_dim_v), computed, storage, stored, max_scores,
        stamps=env.trace(),
    )  # fmt: skip
    if max_scores:
        check_has_scores(spec)
    if spec.is_narrow and device.type == "cuda":
        for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            if value % 16:
                remedy = "CUDA kernels copy 8-bit rows by 16 bytes: pad them, or store 16 bits."
                raise BadHeadDim(name=name, value=value, multiple=16, remedy=remedy)
    return spec


def group_size(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads per key/value head.

    Raises:
        ArgumentError: a head count is wrong, or num_q_heads is no multiple of num_kv_heads.
    """
    checked_count("num_q_heads", num_q_heads, MAX_HEADS)
    checked_count("num_kv_heads", num_kv_heads, MAX_HEADS)
    if num_q_heads % num_kv_heads:
        raise ArgumentError(
            name="num_q_heads",
            reason=f"{num_q_heads} is no positive multiple of num_kv_heads={num_kv_heads}",
        )
    return num_q_heads // num_kv_heads


def checked_count(name: str, value: Any, most: int | None = None) -> None:
    """Raises ArgumentError for anything but an int from 1 to `most`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ArgumentError(name=name, reason=f"is {value!r}; expected an int of at least 1")
    if most is not None and value > most:
        raise ArgumentError(name=name, reason=f"is {value!r}; expected at most {most}")


def checked_number(name: str, value: Any) -> int:
    """The value as an int; raises ArgumentError for anything but an int of at least 0."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 0:
        raise ArgumentError(name=name, reason=f"is {value!r}; expected an int of at least 0")
    return int(value)


def checked_flag(name: str, value: Any) -> bool:
    """The value as a Python bool; raises ArgumentError for anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(name=name, reason=f"is {value!r}; expected True or False")
    return bool(value)


def checked_lse_scale(lse_base: Any) -> float:
    """The factor of natural log-sum-exps; raises ArgumentError for an unknown base."""
    if not isinstance(lse_base, str) or lse_base not in _LSE_SCALE:
        raise ArgumentError(name="lse_base", reason=f"{lse_base!r}; expected string 'e' or '2'")
    return _LSE_SCALE[lse_base]


def checked_scale(sm_scale: Any, head_dim: int) -> float:
    """The factor of q.k; 1/sqrt(head_dim) for None.

    Raises:
        ArgumentError: `sm_scale` is no number, or does not fit into float32.
    """
    if sm_scale is None:
        return float(head_dim**-0.5)
    try:
        scale = float(sm_scale)
        if isinstance(sm_scale, (str, bool)):
            raise ValueError
    except OverflowError:
        scale = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            name="sm_scale", reason=f"is {sm_scale!r}; expected a number, or None"
        ) from None
    if not (math.isfinite(scale) and fits_float32(scale)):
        raise ArgumentError(name="sm_scale", reason=f"{sm_scale} is no finite float32")
    return scale


def _stored(given: str | DType | torch.dtype, computed: DType) -> DType | None:
    """Storage type of keys and values; None if attention computes in that type."""
    names = ", ".join(t.name for t in (computed, *NARROW_DTYPES))
    try:
        found = stored_dtype(given)  # type: ignore[arg-type]
    except KeyError:
        found = None
    if found not in (computed, *NARROW_DTYPES):
        remedy = "Convert the cache, or the queries."
        if str(given).rpartition(".")[2] == "uint8":
            remedy = (
                "If the cache holds 8-bit floats as bytes, declare them and pass the cache as "
                f".view(torch.{NARROW_DTYPES[0].name})."
            )
        elif near := meant(given, (computed, *NARROW_DTYPES)):
            remedy = f"Did you mean {near!r}?"
        raise UnsupportedSpec(
            what=f"kv_dtype {given} with dtype {computed.name}",
            reason=f"keys and values are stored in one of {names}",
            remedy=remedy,
        )
    return None if found == computed else found


def _element(given: str | DType | torch.dtype, device: torch.device) -> DType:
    names = ", ".join(t.name for t in ATTENTION_DTYPES)
    try:
        found = dtype(given)  # type: ignore[arg-type]
    except KeyError:
        found = None
    if found not in ATTENTION_DTYPES:
        near = meant(given, ATTENTION_DTYPES)
        remedy = f"Did you mean {near!r}?" if near else "Convert to one."
        raise UnsupportedSpec(
            what=f"dtype {given}", reason=f"attention computes in {names}", remedy=remedy
        )
    if device.type == "cuda" and found.name == "float32":
        raise UnsupportedSpec(
            what="float32 on CUDA",
            reason="the tensor cores take float16 and bfloat16",
            remedy="Convert q, k and v to bfloat16, or use CPU tensors.",
        )
    return found
