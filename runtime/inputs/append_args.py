"""Checks of an append's arguments: new vectors, caches, lengths and page tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from warploom.codegen.append import AppendSpec
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import KVFormat
from warploom.errors import (
    ArgumentError,
    BadLength,
    IndexOutOfRange,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.inputs.args import (
    Geometry,
    byte_range,
    check_writable,
    other_layout,
    overlap,
)
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.strides import obstacle, reachable
from warploom.runtime.tensors.tensors import as_torch, byte_span
from warploom.scheduler.model.bounds import INT32_MAX

_VECTOR = 8  # elements that a GPU thread loads or stores at once
_ROW_AXES = ("row", "head", "dim")
_TABLES = ("indptr", "kv_indptr", "kv_indices", "last_page_len")


def check_tensors(
    spec: AppendSpec,
    geometry: Geometry,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> tuple[int, ...]:
    """Check shapes, types and strides; returns the strides in the order of STRIDES.

    Raises:
        WrongDType, WrongDevice, WrongShape: a wrong tensor.
        WrongStride: strides of a cache; new vectors may have any strides.
    """
    rows = len(k) if k.dim() else 0
    order = ("token", "head") if geometry.kv_format.layout == "NHD" else ("head", "token")
    cache_axes = ("block", *order, "dim")
    sizes = {"row": rows, "head": geometry.num_kv_heads, "token": spec.page_size}
    found: list[int] = []
    for name, tensor, axes, element, dim in (
        ("k", k, _ROW_AXES, spec.dtype, spec.head_dim_qk),
        ("v", v, _ROW_AXES, spec.dtype, spec.head_dim_v),
        ("k cache", k_cache, cache_axes, spec.cache_dtype, spec.head_dim_qk),
        ("v cache", v_cache, cache_axes, spec.cache_dtype, spec.head_dim_v),
    ):
        _check_one(tensor, name, axes, sizes | {"dim": dim}, element, geometry)
        if axes is cache_axes:
            check_writable(tensor, name)
        by_axis = dict(zip(axes, tensor.stride(), strict=True))
        wanted = ("row", "head") if axes is _ROW_AXES else ("block", "token", "head")
        found += [by_axis[axis] for axis in wanted]
    if rows * geometry.num_kv_heads > INT32_MAX:  # kernels count vectors in int32
        most = INT32_MAX // geometry.num_kv_heads
        raise WrongShape(name="k", got=tuple(k.shape), expected=f"at most {most} rows at a time")
    return tuple(found)


def reachable_rows(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """New keys and values, copied where the kernel cannot reach them; None if it reaches both."""
    found = {name: obstacle(x, _vector_bytes(x)) for name, x in (("k", k), ("v", v))}
    if not any(found.values()):
        return None
    copy_k, copy_v = (
        x if (each := found[name]) is None else reachable(x, name, each)
        for name, x in (("k", k), ("v", v))
    )
    return copy_k, copy_v


def _vector_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel reads or writes at once."""
    return _VECTOR * tensor.element_size() if tensor.is_cuda else 1


def check_sources_apart(addresses: Sequence[int], spans: Sequence[int]) -> None:
    """Refuse new vectors in the memory of a cache: the kernel writes pages while it reads vectors.

    As for `out` of a run, all bytes from a tensor's first to its last count as the tensor's.

    Args:
        addresses: addresses of k, v, the k cache and the v cache.
        spans: bytes of each.

    Raises:
        ArgumentError: k or v overlaps a cache.
    """
    k, v, *caches = ((begin, begin + span) for begin, span in zip(addresses, spans, strict=True))
    for name, new in (("k", k), ("v", v)):
        for cache, held in zip(("k", "v"), caches, strict=True):
            if overlap(new, held):
                reason = (
                    f"reaches into the memory of the {cache} cache, between its first byte and its "
                    "last; give a copy: .clone()"
                )
                raise ArgumentError(name=name, reason=reason)


def check_caches_apart(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse caches with common elements; one may lie in the gaps between the other's elements.

    Args:
        k_cache, v_cache: tensors of one type and number of dimensions; elements of one tensor do
            not overlap each other.

    Raises:
        ArgumentError: the caches share memory, or their strides do not prove that they do not.
    """
    if not overlap(byte_range(k_cache), byte_range(v_cache)):
        return
    low, high = sorted((k_cache, v_cache), key=torch.Tensor.data_ptr)
    distance, rest = divmod(high.data_ptr() - low.data_ptr(), low.element_size())
    if rest or not _fits_gaps(low, high, distance):
        reason = (
            "lies among the elements of the k cache; give each its own memory, or a VirtualCache "
            "the order of parts in which a page holds a token's keys and values: "
            "order=('token', 'layer', 'kv', 'head')"
        )
        raise ArgumentError(name="v cache", reason=reason)


def _fits_gaps(low: torch.Tensor, high: torch.Tensor, distance: int) -> bool:
    """Whether both are parts of one tensor, in which the second begins `distance` behind the first.

    That is so if the axes with strides up to `distance` span less than `distance` in the first, and
    the axes with greater strides are common to both and step over all that smaller axes span.
    """
    axes = []
    for step, other, size, size_of_other in zip(
        low.stride(), high.stride(), low.shape, high.shape, strict=True
    ):
        if min(size, size_of_other) > 1 and step != other:
            return False
        if max(size, size_of_other) > 1:
            axes.append((step if size > 1 else other, size - 1, size_of_other - 1))
    inner = [axis for axis in axes if axis[0] <= distance]
    if sum(step * last for step, last, _ in inner) >= distance:
        return False
    reach = distance + sum(step * last for step, _, last in inner)
    for step, last, last_of_other in sorted(axis for axis in axes if axis[0] > distance):
        if step <= reach:
            return False
        reach += step * max(last, last_of_other)
    return True


def _check_one(
    tensor: torch.Tensor,
    name: str,
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    element: DType,
    geometry: Geometry,
) -> None:
    if tensor.device != geometry.device:
        raise WrongDevice(name=name, got=str(tensor.device), expected=str(geometry.device))
    expected = getattr(torch, element.name)
    if tensor.dtype != expected:
        raise WrongDType(name=name, got=str(tensor.dtype), expected=str(expected))
    shown = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
    if not _fits(tensor, axes, sizes):
        swapped = tuple({"token": "head", "head": "token"}.get(axis, axis) for axis in axes)
        is_other = axes is not _ROW_AXES and _fits(tensor, swapped, sizes)
        hint = other_layout(geometry) if is_other else ""
        raise WrongShape(name=name, got=tuple(tensor.shape), expected=f"[{shown}]{hint}")
    refuse_freed(tensor, name, byte_span(tensor))
    if axes is not _ROW_AXES and (found := obstacle(tensor, _vector_bytes(tensor))):
        remedy = f"{found.remedy[0].upper()}{found.remedy[1:]}."
        raise WrongStride(name=name, got=tensor.stride(), expected=found.reason, remedy=remedy)


def _fits(tensor: torch.Tensor, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Whether the tensor can have these axes, given the known sizes."""
    return tensor.dim() == len(axes) and all(
        size == sizes.get(axis, size) for axis, size in zip(axes, tensor.shape, strict=True)
    )


def check_heads(k: torch.Tensor, k_cache: torch.Tensor, layout: str) -> None:
    """Refuse a cache [block, ...] whose head count matches that of k in the other layout only.

    Raises:
        WrongShape: the message names the layout that fits.
    """
    is_nhd, heads = layout == "NHD", k.shape[1]
    if k_cache.shape[2 if is_nhd else 1] == heads or k_cache.shape[1 if is_nhd else 2] != heads:
        return
    axes, other = (f"token, head={heads}", "HND") if is_nhd else (f"head={heads}, token", "NHD")
    expected = f"[block, {axes}, dim], as k has; layout={other!r} would fit it"
    raise WrongShape(name="k cache", got=tuple(k_cache.shape), expected=expected)


def index_arrays(
    kv_format: KVFormat, device: torch.device, given: tuple[Any, ...], rows: int, pages: int
) -> list[torch.Tensor]:
    """indptr, kv_indptr, kv_indices and last_page_len as tensors on the device.

    Values of device tensors are not checked. Host arrays are checked and copied.

    Args:
        kv_format: format of the cache.
        device: device of the kernel.
        given: the four arrays.
        rows: new rows of keys.
        pages: pages of the cache.

    Raises:
        WrongDType, WrongDevice, WrongShape: a tensor on the device is wrong.
        BadIndptr, BadLength, IndexOutOfRange, WrongShape: an array on the host is wrong.
    """
    on_device = [isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in given]
    if not any(on_device):
        return _from_host(kv_format, device, given, rows, pages)
    found = {}
    for name, value in zip(_TABLES, given, strict=True):
        tensor = as_torch(value, name)
        if tensor.device != device:
            raise WrongDevice(name=name, got=str(tensor.device), expected=str(device))
        if tensor.dtype != torch.int32:
            raise WrongDType(name=name, got=str(tensor.dtype), expected="torch.int32")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise WrongShape(
                name=name, got=tuple(tensor.shape), expected="one contiguous dimension"
            )
        found[name] = tensor
    requests = len(found["indptr"]) - 1
    for name, size in (("kv_indptr", requests + 1), ("last_page_len", requests)):
        if requests < 0 or len(found[name]) < size:
            raise WrongShape(
                name=name, got=tuple(found[name].shape), expected=f"at least ({size},)"
            )
    return list(found.values())


def _from_host(
    kv_format: KVFormat, device: torch.device, given: tuple[Any, ...], rows: int, pages: int
) -> list[torch.Tensor]:
    batch = make_batch(kv_format, *given, rows_name="indptr")
    if batch.q_rows > rows:
        wanted = f"[{batch.q_rows} or more, heads, dim], since indptr[-1] is {batch.q_rows}"
        raise WrongShape(name="k", got=f"[{rows}, heads, dim]", expected=wanted)
    if batch.kv_extent > pages:
        at = int(batch.indices.argmax())
        raise IndexOutOfRange(
            name="kv_indices", index=at, value=int(batch.indices[at]), last=pages - 1, of="page"
        )
    over = np.flatnonzero(batch.q_lens > batch.kv_lens)
    if over.size:
        at = int(over[0])
        most = f"at most {int(batch.kv_lens[at])}, the tokens that the table has"
        raise BadLength(name="new tokens", index=at, value=int(batch.q_lens[at]), expected=most)
    if device.type != "cpu":
        refuse_under_capture(
            device, "append() was given host arrays", "Give int32 tensors on the device."
        )
    here = [value.cpu() if isinstance(value, torch.Tensor) else value for value in given]
    # copies, since torch takes no arrays that are read-only or run backwards
    arrays = [torch.from_numpy(np.asarray(value).copy()) for value in here]
    return [array.to(device, torch.int32).contiguous() for array in arrays]
