"""Sizes of one call of `attention`, and checks that come before a kernel is built for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warploom.dsl.types.dtypes import ATTENTION_DTYPES
from warploom.dsl.types.formats import Dense, Layout
from warploom.errors import ArgumentError, WrongShape
from warploom.runtime.declaring.declare import checked_flag, checked_lse_scale
from warploom.runtime.devices.device import resolve_backend
from warploom.runtime.inputs.args import Geometry, check_type

_COMPUTED = tuple(getattr(torch, found.name) for found in ATTENTION_DTYPES)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of one call."""

    batch: int
    rows: int
    keys: int
    q_heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    shared: bool  # all entries read one sequence of keys

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Sizes:
        """Take the sizes from tensors, and refuse what the wrapper's own checks cannot detect.

        Raises:
            WrongShape: a tensor does not have four dimensions, or q, k and v disagree.
            ArgumentError: no such layout.
        """
        if layout not in ("NHD", "HND"):
            raise ArgumentError(name="layout", reason=f"{layout!r} is neither 'NHD' nor 'HND'")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise WrongShape(name=name, got=tuple(x.shape), expected=f"4 dimensions, {layout}")
        if k.shape[0] not in (1, q.shape[0]):
            expected = f"batch {q.shape[0]}, as q" + (", or 1" if q.shape[0] != 1 else "")
            raise WrongShape(name="k", got=tuple(k.shape), expected=expected)
        if k.shape[3] != q.shape[3]:
            expected = f"head dimension {q.shape[3]}, as q"
            raise WrongShape(name="k", got=tuple(k.shape), expected=expected)
        if v.shape[:3] != k.shape[:3]:
            expected = f"{tuple(k.shape[:3])} before the head dimension, as k"
            raise WrongShape(name="v", got=tuple(v.shape), expected=expected)
        token, head = (1, 2) if layout == "NHD" else (2, 1)
        return cls(
            batch=q.shape[0],
            rows=q.shape[token],
            keys=k.shape[token],
            q_heads=q.shape[head],
            kv_heads=k.shape[head],
            dim_qk=q.shape[3],
            dim_v=v.shape[3],
            shared=k.shape[0] != q.shape[0] or _is_one_entry(k, v),
        )

    @property
    def of_kernel(self) -> tuple[int, ...]:
        """The sizes that a wrapper is declared with."""
        return self.q_heads, self.kv_heads, self.dim_qk, self.dim_v

    def entries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keys or values without batch entries that repeat the first one."""
        return tensor[:1] if self.shared else tensor

    def check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        kv_dtype: torch.dtype | None,
    ) -> None:
        """Refuse what a run would refuse, before a kernel is built, which takes seconds.

        Raises:
            ArgumentError: the number of query heads is no multiple of that of key/value heads.
            WrongDType, WrongDevice: k or v has a wrong type or device.
        """
        if self.q_heads % max(1, self.kv_heads):
            swapped = self.keys > 0 and self.rows > 0 and self.rows % self.keys == 0
            other = "HND" if layout == "NHD" else "NHD"
            hint = f"; in layout={other!r} they are {self.rows} and {self.keys}" if swapped else ""
            raise ArgumentError(
                name="q",
                reason=f"its {self.q_heads} heads are no multiple of k's {self.kv_heads}{hint}",
            )
        if q.dtype not in _COMPUTED:  # the wrapper's own error says more
            return
        geometry = Geometry(
            Dense(layout=layout, shared=self.shared),
            self.q_heads,
            self.kv_heads,
            self.dim_qk,
            self.dim_v,
            q.dtype,
            kv_dtype or q.dtype,
            q.device,
            is_declared=False,
        )
        for name, tensor in (("k", k), ("v", v)):
            check_type(tensor, name, geometry, geometry.kv_dtype)


def _is_one_entry(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all entries of the batch are the same memory, by their strides."""
    return k.shape[0] > 1 and k.stride(0) == 0 == v.stride(0)


def check_options(return_lse: Any, lse_base: Any, backend: Any, device: torch.device) -> None:
    """Refuse options before they become part of the key that wrappers are cached by.

    Raises:
        ArgumentError: `return_lse` is no flag, or there is no such base or back end.
    """
    checked_flag("return_lse", return_lse)
    checked_lse_scale(lse_base)
    resolve_backend(backend, device)
