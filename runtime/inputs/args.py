"""Checks of q, k, v, out and lse against the declaration and the plan; they return strides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from warploom.dsl.types.dtypes import ATTENTION_DTYPES, NARROW_DTYPES
from warploom.dsl.types.formats import KVFormat
from warploom.errors import (
    ArgumentError,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.formats import format_of
from warploom.runtime.formats.base import Format
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.tensors import as_torch, byte_span

_COMPUTED = tuple(getattr(torch, found.name) for found in ATTENTION_DTYPES)  # float32 is last
_NARROW = tuple(getattr(torch, found.name) for found in NARROW_DTYPES)

KV: TypeAlias = tuple[torch.Tensor, torch.Tensor] | torch.Tensor  # a pair, or a cache of both


@dataclass(frozen=True)
class Geometry:
    """Sizes, types and device that every tensor of a wrapper must agree with.

    Attributes:
        kv_format: how keys and values are stored.
        num_q_heads, num_kv_heads: head counts; num_q_heads is a multiple of num_kv_heads.
        head_dim_qk, head_dim_v: lengths of query/key and of value/output vectors.
        dtype: type of q and out.
        kv_dtype: type of k and v.
        device: where all tensors must be.
        is_declared: whether the user declared the types; `attention` takes them from q and k.
    """

    kv_format: KVFormat
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    is_declared: bool = True

    @cached_property
    def format(self) -> Format[KVFormat]:
        """The format's run-time behaviour."""
        return format_of(self.kv_format)

    @property
    def batched(self) -> bool:
        """Whether q and out are [batch, row, head, dim]; else [row, head, dim]."""
        return self.format.batched

    @property
    def q_axes(self) -> tuple[str, ...]:
        """Names of the axes of q and out; those of lse are the same without `dim`."""
        return self.format.q_axes

    @property
    def kv_axes(self) -> tuple[str, ...]:
        """Names of the axes of k and v."""
        return self.format.kv_axes

    def q_shape(self, batch: Batch, dim: int) -> tuple[int, ...]:
        sizes = {"batch": batch.num_requests, "row": batch.q_rows}
        return tuple((sizes | {"head": self.num_q_heads, "dim": dim})[axis] for axis in self.q_axes)

    def lse_shape(self, batch: Batch) -> tuple[int, ...]:
        return self.q_shape(batch, 0)[:-1]


def checked_kv(kv: Any, kv_format: KVFormat, shared: bool = False) -> KV:
    """Keys and values as torch tensors: a pair, or one paged cache [pages, 2, ...].

    Args:
        kv: the pair or the cache.
        kv_format: format of the cache.
        shared: whether the tensors are written to; then tensors that need a copy are refused.

    Raises:
        ArgumentError, WrongShape: `kv` is neither of the two.
    """
    if isinstance(kv, (tuple, list)):
        if len(kv) != 2:
            raise ArgumentError(name="kv", reason=f"has {len(kv)} tensors; expected (k, v)")
        names = ("k cache", "v cache") if shared else ("k", "v")
        return as_torch(kv[0], names[0], shared), as_torch(kv[1], names[1], shared)
    cache = as_torch(kv, "kv", shared)
    refuse_freed(cache, "kv", byte_span(cache))
    if not format_of(kv_format).joins_kv:
        reason = f"is one tensor of shape {tuple(cache.shape)}; expected the pair (k, v)"
        raise ArgumentError(name="kv", reason=reason)
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise WrongShape(
            name="kv", got=tuple(cache.shape), expected="[pages, 2, ...], or the pair (k, v)"
        )
    return cache


def key_value(kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as two tensors."""
    return kv if isinstance(kv, tuple) else (kv[:, 0], kv[:, 1])


def check_query(q: torch.Tensor, geometry: Geometry, batch: Batch) -> tuple[int, ...]:
    """Check q; returns its (batch, row, head) strides."""
    check_type(q, "q", geometry, geometry.dtype)
    expected = geometry.q_shape(batch, geometry.head_dim_qk)
    if tuple(q.shape) != expected:
        text = _described(expected, geometry.q_axes)
        if geometry.batched and q.dim() == 4 and tuple(q.transpose(1, 2).shape) == expected:
            text += other_layout(geometry)
        elif not geometry.batched and tuple(q.shape[1:]) == expected[1:]:
            text += f"; {expected[0]} is {_rows_from(batch)}"
        raise WrongShape(name="q", got=tuple(q.shape), expected=text)
    return row_strides(q.stride(), geometry)


def _rows_from(batch: Batch) -> str:
    """The argument of `plan` that determines how many rows q must have."""
    return "q_rows of the plan" if isinstance(batch, OnDevice) else "qo_indptr[-1] of the plan"


def check_key_values(
    k: torch.Tensor, v: torch.Tensor, geometry: Geometry, batch: Batch
) -> tuple[int, ...]:
    """Check k and v, which share one list of pages or tokens; returns the strides of both."""
    strides = tuple(
        stride
        for name, tensor in (("k", k), ("v", v))
        for stride in _checked_key_value(tensor, name, geometry, batch)
    )
    shown = {"block": geometry.format.block_name[1], "token": "tokens"}
    for axis, of_k, of_v in zip(geometry.kv_axes, k.shape, v.shape, strict=True):
        if axis in shown and of_k != of_v:
            expected = f"as many {shown[axis]} as k, whose shape is {tuple(k.shape)}"
            raise WrongShape(name="v", got=tuple(v.shape), expected=expected)
    geometry.format.check_extent(k, batch)
    return strides


def _checked_key_value(
    tensor: torch.Tensor, name: str, geometry: Geometry, batch: Batch
) -> tuple[int, ...]:
    """Check k or v; returns its (block, token, head) strides."""
    check_type(tensor, name, geometry, geometry.kv_dtype)
    dim = geometry.head_dim_qk if name == "k" else geometry.head_dim_v
    exact, least = geometry.format.kv_sizes(batch)
    exact = {"head": geometry.num_kv_heads, "dim": dim} | exact
    axes = geometry.kv_axes
    if not _fits(tensor, axes, exact, least):
        sizes = {axis: f">={n}" for axis, n in least.items()}
        sizes |= {axis: f"={n}" for axis, n in exact.items()}
        shown = {"block": geometry.format.block_name[0]}
        wanted = [shown.get(axis, axis) + sizes[axis] for axis in axes]
        swapped = tuple({"token": "head", "head": "token"}.get(axis, axis) for axis in axes)
        hint = other_layout(geometry) if _fits(tensor, swapped, exact, least) else ""
        if geometry.format.joins_kv:
            hint = f"; a page has page_size={exact['token']} tokens{hint}"
        raise WrongShape(
            name=name, got=tuple(tensor.shape), expected=f"[{', '.join(wanted)}]{hint}"
        )
    strides = dict(zip(axes, tensor.stride(), strict=True))
    block, token, head = (strides.get(axis, 0) for axis in ("block", "token", "head"))
    return geometry.format.kernel_strides(block, token, head)


def _fits(
    tensor: torch.Tensor, axes: tuple[str, ...], exact: dict[str, int], least: dict[str, int]
) -> bool:
    """Whether the tensor can have these axes: sizes equal `exact`, or are at least `least`."""
    if tensor.dim() != len(axes):
        return False
    sizes = zip(axes, tensor.shape, strict=True)
    return all(n == exact[axis] if axis in exact else n >= least[axis] for axis, n in sizes)


def other_layout(geometry: Geometry) -> str:
    """A hint for shapes that have heads where tokens are expected."""
    return f"; layout={'HND' if geometry.kv_format.layout == 'NHD' else 'NHD'!r} would fit it"


def check_out(out: torch.Tensor, geometry: Geometry, batch: Batch) -> tuple[int, ...]:
    """Check the caller's output tensor; returns its (batch, row, head) strides."""
    check_type(out, "out", geometry, geometry.dtype)
    expected = geometry.q_shape(batch, geometry.head_dim_v)
    if tuple(out.shape) != expected:
        raise WrongShape(
            name="out", got=tuple(out.shape), expected=_described(expected, geometry.q_axes)
        )
    check_writable(out, "out")
    return row_strides(out.stride(), geometry)


def check_lse(
    lse: torch.Tensor, geometry: Geometry, batch: Batch, name: str = "lse"
) -> tuple[int, ...]:
    """Check the caller's tensor for one number per row; returns its (batch, row, head) strides."""
    if lse.device != geometry.device:
        found = {"name": name, "got": str(lse.device), "expected": str(geometry.device)}
        raise WrongDevice.of_written(**found)
    if lse.dtype != torch.float32:
        raise WrongDType(
            name=name,
            got=str(lse.dtype),
            expected="torch.float32",
            remedy="Sums and maxima are float32 whatever q is: allocate it so.",
        )
    refuse_freed(lse, name, byte_span(lse))
    expected = geometry.lse_shape(batch)
    axes = geometry.q_axes[:-1]
    if tuple(lse.shape) != expected:
        raise WrongShape(name=name, got=tuple(lse.shape), expected=_described(expected, axes))
    check_writable(lse, name)
    return row_strides(lse.stride(), geometry)


def check_results(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    geometry: Geometry,
    batch: Batch,
    max_scores: torch.Tensor | None = None,
) -> None:
    """Check the caller's tensors for results; `inputs` are q, k and v.

    Raises:
        WrongDType, WrongDevice, WrongShape, WrongStride: a wrong tensor.
        ArgumentError: a result overlaps another tensor.
    """
    if out is not None:
        check_out(out, geometry, batch)
    if lse is not None:
        check_lse(lse, geometry, batch)
    if max_scores is not None:
        check_lse(max_scores, geometry, batch, "max_scores")
    written = {"out": out, "lse": lse, "max_scores": max_scores}
    check_apart(written, dict(zip("qkv", inputs, strict=True)))


def check_apart(
    written: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Refuse results whose byte range, first to last, overlaps an input or another result."""
    taken = {name: byte_range(tensor) for name, tensor in inputs.items()}
    for name, tensor in written.items():
        if tensor is None:
            continue
        own = byte_range(tensor)
        for other, its in taken.items():
            if overlap(own, its):
                raise ArgumentError(
                    name=name, reason=f"reaches into the memory of {other}; give another tensor"
                )
        taken[name] = own


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two ranges of addresses, as `byte_range` gives them, have bytes in common."""
    return max(a[0], b[0]) < min(a[1], b[1])


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last byte; equal if the tensor is empty."""
    begin = tensor.data_ptr()
    return begin, begin + byte_span(tensor)


def check_type(tensor: torch.Tensor, name: str, geometry: Geometry, dtype: torch.dtype) -> None:
    """Check device and type of q, k, v or out."""
    if tensor.device != geometry.device:
        found = {"name": name, "got": str(tensor.device), "expected": str(geometry.device)}
        if name == "out":
            raise WrongDevice.of_written(**found)
        whose = ", which the wrapper was made for" if geometry.is_declared else ", as q"
        raise WrongDevice(whose=whose, **found)
    if tensor.dtype != dtype:
        raise WrongDType(
            name=name,
            got=str(tensor.dtype),
            expected=str(dtype),
            remedy=_remedy(tensor.dtype, name, geometry, dtype),
        )
    refuse_freed(tensor, name, byte_span(tensor))


def _remedy(got: torch.dtype, name: str, geometry: Geometry, expected: torch.dtype) -> str:
    """Advice for a tensor of a wrong type; it proposes no declaration that would be refused."""
    if got == torch.uint8:  # 8-bit floats are stored as bytes where torch has no type for them
        narrow = expected if expected in _NARROW else _NARROW[0]
        declare = "" if expected in _NARROW else f" and declare kv_dtype={narrow}"
        if name in ("k", "v"):
            return f"If its bytes are 8-bit floats, pass it as .view({narrow}){declare}."
    if name == "out":
        return f"Allocate out with dtype={expected}."
    convert = f"Convert it with .to({expected})"
    if name in ("k", "v") and expected in _NARROW and got in (*_COMPUTED, torch.float64):
        rounded = ".round()" if expected == torch.int8 else ""
        convert = (
            f"Divide it by its scale, which the variant gives back (KVScale, HeadKVScale or "
            f"TokenKVScale), and convert it: ({name} / scale){rounded}.to({expected})"
        )
    if not geometry.is_declared:
        return f"{convert}."
    if name in ("k", "v") and got == torch.int8:  # a conversion would lose the scales
        scales = "KVScale, HeadKVScale or TokenKVScale"
        return f"Declare kv_dtype='int8', and their scales by the variant: {scales}."
    if name == "v" and got in (*_NARROW, geometry.dtype):  # k was checked before
        return f"{convert}: k has this type, and both are stored in one."
    if name == "k" and got in (*_NARROW, geometry.dtype):
        return f"{convert}, or declare kv_dtype={got}."
    computed = _COMPUTED if geometry.device.type == "cpu" else _COMPUTED[:2]
    if name == "q" and got in computed:  # q is checked first: k and v may agree
        return f"{convert}, or declare dtype={got}."
    return f"{convert}."


def check_writable(tensor: torch.Tensor, name: str) -> None:
    """Check that a kernel may write a tensor: no two elements overlap, and no gradient is tracked.

    Raises:
        WrongStride: elements overlap.
        ArgumentError: the tensor requires a gradient.
    """
    reach = 0  # offset of the last element along the axes with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            expected = "elements that overlap, as of an expanded tensor, cannot be written"
            raise WrongStride(name=name, got=tensor.stride(), expected=expected)
        reach += stride * (size - 1)
    if tensor.requires_grad and torch.is_grad_enabled():
        reason = "requires a gradient, which is not computed for what is written in place; "
        raise ArgumentError(name=name, reason=f"{reason}give {name}.detach()")


def row_strides(strides: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """The (batch, row, head) strides of q, out or lse; 0 for an axis that it does not have."""
    by_name = dict(zip(geometry.q_axes, strides, strict=False))  # lse has no dim
    return tuple(by_name.get(axis, 0) for axis in ("batch", "row", "head"))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    sizes = [max(size, 1) for size in shape[1:]]
    return tuple(math.prod(sizes[axis:]) for axis in range(len(shape)))


def _described(shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    return f"{shape}, which is [{', '.join(axes)}]"
