"""A declaration of attention, checked: what holds for all batches of a wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.runtime.declaring.declare import (
    as_format,
    checked_flag,
    checked_lse_scale,
    checked_scale,
    group_size,
    make_spec,
)
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.declaring.wrapper_options import checked_options
from warploom.runtime.devices.device import Backend, resolve_backend
from warploom.runtime.formats.base import Format
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.launching.pretransformed_keys import KeyTransform
from warploom.runtime.planning.rules import Options
from warploom.runtime.planning.visibility import Heads


@dataclass(frozen=True)
class DeclaredAttention:
    """The arguments of an `AttentionWrapper`, checked.

    Attributes:
        variant: the functors.
        spec: the same traced, with the types of tensors.
        kv_format: storage of keys and values.
        heads: head counts.
        device: where tensors must be; of a declaration without a device only its type counts.
        backend: what computes.
        sm_scale: factor of q.k.
        lse_scale: factor that brings the natural log-sum-exp to the base that was asked for.
        options: bounds, tile and others that plans follow.
        key_transform: where keys are transformed.
    """

    variant: Variant
    spec: AttentionSpec
    kv_format: KVFormat
    heads: Heads
    device: torch.device
    backend: Backend
    sm_scale: float
    lse_scale: float
    options: Options
    key_transform: KeyTransform

    @classmethod
    def of(
        cls,
        variant: Variant | type[Variant] | None,
        device: Callable[[], torch.device],
        backend: str | None,
        planned_format: Callable[[KVFormat], Format[Any]],
        *,
        kv_format: KVFormat | None,
        num_q_heads: int,
        num_kv_heads: int | None,
        head_dim: int,
        head_dim_v: int | None,
        dtype: str | DType | torch.dtype,
        kv_dtype: str | DType | torch.dtype | None,
        sm_scale: float | None,
        lse_base: str,
        max_scores: bool,
        **options: Any,
    ) -> DeclaredAttention:
        """Check the arguments of a wrapper, whose constructor documents them and what it raises.

        Args:
            device: gives the device, once variant and format are known to be some.
            planned_format: gives the format as planners use it.
            options: those of `checked_options`.
        """
        variant = as_variant(variant)
        traced = traced_once(variant)[1]
        kv_format = as_format(kv_format)
        where = device()
        tells = checked_flag("max_scores", max_scores)
        computed_by = resolve_backend(backend, where)
        num_kv = num_q_heads if num_kv_heads is None else num_kv_heads
        group_size(num_q_heads, num_kv)
        spec = make_spec(traced, head_dim, head_dim_v, dtype, kv_format, where, kv_dtype, tells)
        heads = Heads(int(num_q_heads), int(num_kv))  # from NumPy's, too
        lse_scale, sm_scale = checked_lse_scale(lse_base), checked_scale(sm_scale, head_dim)
        found, key_transform = checked_options(
            spec, computed_by, planned_format(kv_format), heads.group_size, **options
        )
        return cls(
            variant, spec, kv_format, heads, where, computed_by, sm_scale, lse_scale, found,
            key_transform,
        )  # fmt: skip

    @property
    def bound_inputs(self) -> dict[str, Any]:
        """Values bound at the variant's construction that the traced functors read."""
        bound = self.variant.inputs()
        return {name: bound[name] for name in self.spec.variant.input_names if name in bound}

    def geometry(self, types_are_declared: bool) -> Geometry:
        """What tensors must agree with; messages propose other types if the user declared them."""
        spec = self.spec
        return Geometry(
            kv_format=self.kv_format,
            num_q_heads=self.heads.num_q,
            num_kv_heads=self.heads.num_kv,
            head_dim_qk=spec.head_dim_qk,
            head_dim_v=spec.head_dim_v,
            dtype=getattr(torch, spec.dtype.name),
            kv_dtype=getattr(torch, spec.stored_dtype.name),
            device=self.device,
            is_declared=types_are_declared,
        )
