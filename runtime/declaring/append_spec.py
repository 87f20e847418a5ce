"""Checks of an `Appender`'s declaration, which make an `AppendSpec` of it without a device."""

from __future__ import annotations

import torch

from warploom.codegen.append import AppendSpec, key_value_hooks
from warploom.dsl.types.dtypes import ATTENTION_DTYPES, NARROW_DTYPES, DType, meant
from warploom.dsl.types.dtypes import kv_dtype as kept_dtype
from warploom.dsl.types.formats import KVFormat, Paged
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, BadHeadDim
from warploom.runtime.declaring.declare import checked_count, group_size
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.formats import format_of


def append_spec(
    transforms: TracedVariant,
    *,
    kv_format: Paged,
    num_kv_heads: int,
    num_q_heads: int | None,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str | DType | torch.dtype,
    kv_dtype: str | DType | torch.dtype | None,
) -> AppendSpec:
    """Check the declaration of an `Appender`, whose constructor documents the arguments.

    Raises:
        BadHeadDim, ArgumentError: no kernel supports the declaration.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        checked_count(name, value)
        if value % 8 or not 8 <= value <= 256:
            raise BadHeadDim(name=name, value=value, multiple=8)
    check_format(kv_format)
    group_size(num_kv_heads if num_q_heads is None else num_q_heads, num_kv_heads)
    given = _element(dtype, "dtype")
    kept = given
    if kv_dtype is not None:
        kept = _element(kv_dtype, "kv_dtype", (*ATTENTION_DTYPES, *NARROW_DTYPES))
    return AppendSpec(transforms, head_dim, head_dim_v, given, kept, kv_format.page_size)


def check_format(kv_format: object) -> None:
    """Raise ArgumentError for a cache that appends do not support."""
    known = isinstance(kv_format, KVFormat)
    obstacle = format_of(kv_format).obstacle_to_appending if known else "is no paged cache"
    if obstacle:
        raise ArgumentError(name="kv_format", reason=f"{kv_format} {obstacle}")


def transforms_of(variant: Variant) -> TracedVariant:
    """The hooks of a variant that appends apply.

    Raises:
        ArgumentError: the variant has an `obstacle_to_appending`.
    """
    if obstacle := variant.obstacle_to_appending:
        raise ArgumentError(name="variant", reason=obstacle)
    return key_value_hooks(traced_once(variant)[1])


def _element(
    given: str | DType | torch.dtype, name: str, allowed: tuple[DType, ...] = ATTENTION_DTYPES
) -> DType:
    try:
        found = kept_dtype(given)  # type: ignore[arg-type]
    except KeyError:
        found = None
    if found not in allowed:
        names = ", ".join(one.name for one in allowed)
        near = meant(given, allowed)
        hint = f", which may mean {near!r}" if near else ""
        raise ArgumentError(name=name, reason=f"is {given}{hint}; expected one of {names}")
    return found
