"""Append new keys and values to a paged cache, through a variant's key and value transform.

The kernel reads lengths and page tables from the caller's device arrays: each replay of a CUDA
graph that holds an append writes where these arrays then point.
"""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import Any

import torch

from warploom.calls import explained
from warploom.codegen.abi import Packer
from warploom.codegen.append import COUNTS, POINTERS, STRIDES
from warploom.codegen.compilers.hostcc import host_target
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import Layout, Paged
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.stand_ins import uncompiled, unseen
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import WrongCall, WrongShape
from warploom.hints import meant
from warploom.runtime.declaring.append_spec import append_spec, check_format, transforms_of
from warploom.runtime.devices.device import cuda_facts, resolve_device
from warploom.runtime.devices.loaded import load
from warploom.runtime.devices.params import Block
from warploom.runtime.formats.batch import Batch, Sizes
from warploom.runtime.inputs.append_args import (
    check_caches_apart,
    check_heads,
    check_sources_apart,
    check_tensors,
    index_arrays,
    reachable_rows,
)
from warploom.runtime.inputs.args import Geometry, checked_kv, key_value
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.missing import refuse_unread
from warploom.runtime.tensors.plain import refuse_freed, unrecorded
from warploom.runtime.tensors.tensors import as_torch, byte_span
from warploom.runtime.tensors.uncopied import Uncopied
from warploom.runtime.wrappers.guard import Guard

_OUTSIDE = "it writes to the cache; call it outside of the compiled function, before it"


class Appender(Uncopied):
    """Writes new keys and values of a batch into the pages that a page table names.

    One appender serves all layers and all batches. Calls from several threads wait for each other.

    Attributes:
        spec: what the kernel is compiled for.
        device: where tensors must be.
    """

    @unseen
    def __init__(
        self,
        variant: Variant | type[Variant] | None = None,
        *,
        kv_format: Paged,
        num_kv_heads: int,
        num_q_heads: int | None = None,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: str | DType | torch.dtype = "float16",
        kv_dtype: str | DType | torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Declare the appender, and build its kernel.

        Args:
            variant: its `key_transform` and `value_transform` are applied before the write; other
                hooks are ignored. The variant of attention must then not apply them again.
            kv_format: page size and layout of the cache.
            num_kv_heads, num_q_heads: head counts; num_q_heads (which functors may read) defaults
                to num_kv_heads.
            head_dim, head_dim_v: multiples of 8 from 8 to 256; head_dim_v defaults to head_dim.
            dtype: type of new keys and values: float16, bfloat16 or float32.
            kv_dtype: type of the cache, to which results are rounded; `dtype` by default. Numbers
                too large for float8_e4m3fn, float8_e5m2 or int8 become its largest number; let the
                transforms divide by the scales that the variant of attention multiplies with.
            device: the current CUDA device by default, or the CPU.

        Raises:
            VariantError: the variant cannot be traced.
            BadHeadDim, ArgumentError: no kernel supports the declaration.
            NoGpu, NoHostCompiler, NoCudaCompiler: the device or its compiler is missing.
        """
        self.device = resolve_device(device)
        self._variant = as_variant(variant)
        transforms, bound = self._applied(self._variant)
        self.spec = append_spec(
            transforms, kv_format=kv_format, num_kv_heads=num_kv_heads, num_q_heads=num_q_heads,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
        num_q_heads = num_kv_heads if num_q_heads is None else num_q_heads
        self._format = kv_format
        self._geometry = Geometry(
            kv_format, num_q_heads, num_kv_heads, head_dim, self.spec.head_dim_v,
            getattr(torch, self.spec.dtype.name), getattr(torch, self.spec.cache_dtype.name),
            self.device,
        )  # fmt: skip
        self._inputs = Inputs(transforms, self._geometry, call="append")
        self._inputs.bind(bound)
        packer = Packer(self.spec.fields)
        self._block = Block(packer, packer.size)
        self._block.set("num_q_heads", num_q_heads)
        self._block.set("num_kv_heads", num_kv_heads)
        self._inputs.write_planned(self._block)
        self._needs_inputs = self._inputs.incomplete
        self._write_strides = self._block.writer("q", STRIDES)
        self._write_pointers = self._block.writer("Q", POINTERS)
        self._write_counts = self._block.writer("i", COUNTS)
        self._seen: tuple[object, ...] | None = None
        self._spans: list[int] = []  # bytes from the first element to the last
        self._guard = Guard(type(self).__name__, self._torn)
        self._apart: int | None = None  # bytes from k to v cache, once checked to be disjoint
        on_gpu = self.device.type == "cuda"
        target = cuda_facts(self.device.index).arch if on_gpu else host_target()
        source = self.spec.render("cuda" if on_gpu else "cpp")
        grid, threads = (0, None) if on_gpu else (1, 1)
        kernel = load(self.spec, source, target, self.device, grid, threads)
        self._launch = kernel.bind(self._block)

    def _applied(
        self, variant: Variant | type[Variant] | None
    ) -> tuple[TracedVariant, dict[str, Any]]:
        """The variant's transforms, and the values bound at its construction that they read."""
        made = as_variant(variant)
        transforms = transforms_of(made)
        return transforms, _bound(made, transforms)

    @uncompiled(_OUTSIDE)
    @unrecorded("append")
    @explained
    @unseen
    def __call__(
        self,
        k: Any,
        v: Any,
        kv: Any,
        indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        last_page_len: Any,
        **inputs: Any,
    ) -> None:
        """Append the new tokens of each request behind its cached tokens, on the current stream.

        The page table describes the cache *with* the new tokens, as `plan` takes it afterwards: the
        last `indptr[i + 1] - indptr[i]` of request i's tokens are written. Index arrays on the
        device are neither checked nor copied, so that a captured append follows their contents; an
        entry that points outside the cache writes nothing. Index arrays on the host are checked,
        and copied if necessary.

        Args:
            k: [rows, num_kv_heads, head_dim], new keys of all requests.
            v: [rows, num_kv_heads, head_dim_v].
            kv: (k cache, v cache), or one cache [pages, 2, ...]; see `AttentionWrapper.run`.
            indptr: int32 [requests + 1], where each request's new rows begin. Rows of k and v past
                indptr[-1] are not appended, so that a graph can hold more rows than a batch has.
            kv_indptr: int32 [requests + 1], in pages.
            kv_indices: int32, pages.
            last_page_len: int32 [requests], tokens in each request's last page.
            **inputs: values of the fields that the transforms read.

        Raises:
            WrongDType, WrongDevice, WrongShape: a wrong tensor.
            WrongStride: the cache has strides or an address that kernels cannot write to. (Such k
                and v are copied.)
            BadIndptr, BadLength, IndexOutOfRange: a wrong index array on the host.
            UnknownInput, MissingInput: a wrong input.
            ArgumentError: caches cannot be written, share memory, or hold k or v.

        No gradient flows through a cache: k and v are treated as detached.
        """
        if inputs:
            refuse_unread(self._variant, self.spec.variant, inputs)
        k, v = as_torch(k, "k"), as_torch(v, "v")
        tensors = k, v, *key_value(checked_kv(kv, self._format, shared=True))
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            self._append(tensors, (indptr, kv_indptr, kv_indices, last_page_len), inputs)
        finally:
            held.leave()

    def _append(
        self,
        tensors: tuple[torch.Tensor, ...],
        given: tuple[Any, ...],
        inputs: dict[str, Any],
    ) -> None:
        """Append; the calling thread holds the guard."""
        addresses = [x.data_ptr() for x in tensors]
        if not all(addresses):
            for name, tensor in zip(("k", "v", "k cache", "v cache"), tensors, strict=True):
                refuse_freed(tensor, name, byte_span(tensor))
        seen = (
            tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors),
            torch.is_grad_enabled(),
            *(address & 15 for address in addresses),
        )
        if seen != self._seen:  # the same shapes again cost a comparison
            strides = check_tensors(self.spec, self._geometry, *tensors)
            if (copies := reachable_rows(*tensors[:2])) is not None:
                self._append((*copies, *tensors[2:]), given, inputs)
                return
            self._seen = None
            self._write_strides(*strides)
            self._seen, self._spans = seen, [byte_span(x) for x in tensors]
            self._apart = None
        check_sources_apart(addresses, self._spans)
        distance = addresses[3] - addresses[2]
        if distance != self._apart:
            check_caches_apart(tensors[2], tensors[3])
            self._apart = distance
        pages = min(len(x) for x in tensors[2:])
        rows = len(tensors[0])
        tables = index_arrays(self._format, self.device, given, rows, pages)
        requests = len(tables[0]) - 1
        self._write_pointers(*addresses, *(x.data_ptr() for x in tables))
        self._write_counts(requests, rows, len(tables[2]), pages)
        kept: dict[str, torch.Tensor] = {}
        if inputs or self._needs_inputs or self._inputs.overridden:
            self._inputs.for_batch(_heads_only(requests))
            kept = self._inputs.write_given(inputs, self._block)
        if requests > 0:
            self._enqueue()
        del kept  # input tensors must live until the launch

    def _torn(self) -> None:
        """Make the next call write all parameters."""
        self._seen, self._inputs.overridden = None, True

    def _enqueue(self) -> None:
        if self.device.type == "cpu":
            self._launch(0)
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device):
            self._launch(stream)


@uncompiled(_OUTSIDE)
@unrecorded("append")
@unseen
def append(
    k: Any,
    v: Any,
    kv: Any,
    indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    last_page_len: Any,
    *,
    variant: Variant | type[Variant] | None = None,
    layout: Layout = "NHD",
    **inputs: Any,
) -> None:
    """Append new keys and values to a paged cache, through a cached `Appender` for these tensors.

    A page that two requests write to has undefined contents: requests may share full pages only.

    Args:
        k, v: [rows, num_kv_heads, head_dim], of one type: float16, bfloat16 or float32. Results
            are converted to the cache's type, which may be any of these, or one of 8 bits.
        kv, indptr, kv_indptr, kv_indices, last_page_len: see `Appender`. As there, rows of k and v
            past indptr[-1] are not appended, and are no error.
        variant: its key and value transform are applied before the write.
        layout: layout of the cache.
        **inputs: values of the fields that the transforms read.

    Raises:
        as `Appender`; WrongCall: an argument of the `Appender` constructor was given, which this
            function derives from the tensors.
    """
    made = None if variant is None else as_variant(variant)
    transforms = _plain() if made is None else transforms_of(made)
    if inputs and (declared := _READ_OFF & inputs.keys() - {*transforms.input_names}):
        refuse_declared(min(declared), inputs)
    if inputs and made is not None:
        refuse_unread(made, transforms, inputs)
    k, v = as_torch(k, "k"), as_torch(v, "v")
    k_cache, v_cache = key_value(checked_kv(kv, Paged(1, layout=layout), shared=True))
    for name, tensor, axes in (("k", k, 3), ("v", v, 3), ("k cache", k_cache, 4)):
        if tensor.dim() != axes:
            raise WrongShape(name=name, got=tuple(tensor.shape), expected=f"{axes} dimensions")
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    heads = k_cache.shape[2 if layout == "NHD" else 1]
    if k.shape[1] == v.shape[1] != heads:
        check_heads(k, k_cache, layout)
    element = v.dtype if v.dtype == k_cache.dtype else k.dtype  # errors then name the odd tensor
    appender = _appender(
        threading.get_ident(), transforms, page_size, layout, heads, k.shape[2], v.shape[2],
        element, k_cache.dtype, k.device,
    )  # fmt: skip
    given = inputs if made is None else _bound(made, transforms) | inputs
    appender(k, v, (k_cache, v_cache), indptr, kv_indptr, kv_indices, last_page_len, **given)


# arguments of the `Appender` constructor that `append` derives from the tensors
_READ_OFF = frozenset(
    ("kv_format", "kv_layout", "page_size", "num_kv_heads", "num_q_heads", "head_dim", "head_dim_v",
     "dtype", "kv_dtype", "device")
)  # fmt: skip


def refuse_declared(name: str, given: dict[str, Any]) -> None:
    """Raise WrongCall for an argument of the constructor, or one that has another name here."""
    if called := meant("append", name):
        raise WrongCall(function="append", reason=f"it takes no {name!r}", hint=called)
    if "kv_format" in given:
        check_format(given["kv_format"])
    reason = f"it takes no {name!r}: page size, heads, types and device are those of the tensors"
    raise WrongCall(function="append", reason=reason, hint=" Declare them to warploom.Appender.")


class _Unbound(Appender):
    """An appender for all variants with these transforms; each call passes all inputs."""

    def __init__(self, transforms: TracedVariant, **declared: Any) -> None:
        self._transforms = transforms
        super().__init__(**declared)

    def _applied(
        self, variant: Variant | type[Variant] | None
    ) -> tuple[TracedVariant, dict[str, Any]]:
        return self._transforms, {}


@lru_cache(maxsize=64)
def _appender(
    thread: int,  # an appender serves one thread at a time
    transforms: TracedVariant,
    page_size: int,
    layout: Layout,
    heads: int,
    dim: int,
    dim_v: int,
    element: torch.dtype,
    cache: torch.dtype,
    device: torch.device,
) -> Appender:
    return _Unbound(
        transforms,
        kv_format=Paged(page_size, layout=layout),
        num_kv_heads=heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=element,
        kv_dtype=cache,
        device=device,
    )


@cache
def _plain() -> TracedVariant:
    """The transforms of plain attention; cached, so that calls do not look them up again."""
    return transforms_of(Variant())


def _bound(variant: Variant, transforms: TracedVariant) -> dict[str, Any]:
    """The values bound to a variant at construction that its transforms read."""
    bound = variant.inputs()
    return {name: bound[name] for name in transforms.input_names if name in bound}


def _heads_only(requests: int) -> Batch:
    """Sizes that inputs are checked against; only the device knows the token counts."""
    return Batch(0, 0, Sizes(requests, requests, 0, 1.0, 0, 0, 0, 0))
