"""What FlashInfer is told at each plan, and a wrapper here once: heads, types, format, variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from numbers import Real
from typing import Any

import torch

from warploom.dsl.types.formats import KVFormat, Paged
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.engines.flashinfer.refusals import refuse
from warploom.engines.flashinfer.variants import Scores
from warploom.errors import ArgumentError
from warploom.runtime.declaring.declare import checked_count
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds


@dataclass(frozen=True)
class Types:
    """Element types of queries, of keys and values, and of the output."""

    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype

    @classmethod
    def of(cls, q: Any, kv: Any = None, out: Any = None) -> Types:
        """Types as FlashInfer names them: torch's, or their names; those left out are that of q.

        Raises:
            ArgumentError: no type of torch.
            UnsupportedByEngine: queries or outputs of less than 16 bits, or keys of 16 bits in
                another type than queries.
        """
        types = cls(
            element_type("q_data_type", q),
            element_type("kv_data_type", q if kv is None else kv),
            element_type("o_data_type", q if out is None else out),
        )
        if types.q.itemsize < 2:
            remedy = "Give q in float16 or bfloat16, beside a cache of 8 bits."
            refuse(f"queries of type {types.q}", "kernels multiply in 16 bits", remedy)
        if types.out.itemsize < 2:
            remedy = "Leave o_data_type out, and convert the output."
            refuse(f"outputs of type {types.out}", "outputs have the type of q", remedy)
        if types.kv.itemsize > 1 and types.kv != types.q:
            remedy = "Convert q, or keep keys and values in the type of q, or in 8 bits."
            refuse(f"keys of type {types.kv} beside {types.q}", "their types differ", remedy)
        if types.kv == torch.uint8:
            remedy = "Keep keys and values in float8_e4m3fn, float8_e5m2, int8 or 16 bits."
            refuse("keys of type uint8", "4-bit keys and values have no kernel", remedy)
        return types

    @property
    def narrow(self) -> torch.dtype | None:
        """The type of keys and values where it is not that of queries."""
        return None if self.kv == self.q else self.kv


def paged_format(page_size: int, layout: Any, kind: type[Paged] = Paged) -> Paged:
    """`Paged`, or another kind of it; raises ArgumentError for what is no size of a page."""
    checked_count("page_size", page_size, MAX_LENGTH)
    return kind(page_size, layout=layout)


def element_type(name: str, given: Any) -> torch.dtype:
    """A type of torch's from itself or its name; raises ArgumentError for others."""
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ArgumentError(name=name, reason=f"is {given!r}; expected a torch.dtype or its name")
    return found


@dataclass(frozen=True)
class Declaration:
    """All that a wrapper is made of: a key, as equal ones share a wrapper.

    Attributes:
        scores: its functors.
        kv_format: storage of keys and values.
        num_q_heads, num_kv_heads, head_dim, head_dim_v: as `AttentionWrapper` has them.
        types: of elements.
        sm_scale: factor of q.k; None is 1/sqrt(head_dim).
        batch_invariant: keys are cut in the same way in any batch.
    """

    scores: Scores
    kv_format: KVFormat
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None
    types: Types
    sm_scale: float | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Counts, before anything is computed with them; wrappers check the rest."""
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if (given := getattr(self, name)) is not None:
                checked_count(name, given)
        scale = self.sm_scale
        if isinstance(scale, Real) and isclose(scale, self.head_dim**-0.5, rel_tol=1e-12):
            object.__setattr__(self, "sm_scale", None)  # the default is one with its own value

    def using(self, has_scales: bool, has_sinks: bool) -> Declaration:
        """With what a run is given and a plan is not told of."""
        scores = replace(self.scores, has_scales=has_scales, has_sinks=has_sinks)
        return replace(self, scores=scores)

    def make(self, device: torch.device, bounds: Bounds | None) -> AttentionWrapper:
        """The wrapper; with bounds, one whose runs CUDA graphs can hold."""
        return AttentionWrapper(
            self.scores.variant, kv_format=self.kv_format, num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            dtype=self.types.q, kv_dtype=self.types.narrow, device=device, sm_scale=self.sm_scale,
            lse_base="2", bounds=bounds, cuda_graph=bounds is not None,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip


def splits_are_fixed(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Whether the caller asks for the same bits in any batch, by either of FlashInfer's ways."""
    return bool(disable_split_kv) or (fixed_split_size is not None and fixed_split_size > 0)
