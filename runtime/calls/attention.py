"""`attention(q, k, v)`: dense attention in one call, with a cache of planned wrappers."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, overload

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from warploom import forks
from warploom.dsl.types.dtypes import NARROW_DTYPES
from warploom.dsl.types.formats import Dense, Layout
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.stand_ins import unseen
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ForbiddenUnderCapture, WrongCall
from warploom.runtime.calls.attention_args import (
    check_lengths,
    checked_lens,
    read_inputs,
    through_operator,
    values_of,
)
from warploom.runtime.calls.sizes import Sizes, check_options
from warploom.runtime.declaring.declare import checked_scale
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.devices.graph_hold import KeptForGraphs
from warploom.runtime.inputs.aux_outputs import (
    AuxOutput,
    AuxRequest,
    MaxScores,
    Requested,
    checked_request,
    with_aux,
)
from warploom.runtime.inputs.missing import refuse_missing
from warploom.runtime.operators import custom_op
from warploom.runtime.tensors.plain import followed, needs_operator, refuse_traced
from warploom.runtime.tensors.shortcuts import raw_stream
from warploom.runtime.tensors.strides import new_result
from warploom.runtime.tensors.tensors import as_torch
from warploom.runtime.wrappers.wrapper import AttentionWrapper

_LIMIT = 64
_NARROW = tuple(getattr(torch, found.name) for found in NARROW_DTYPES)


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    variant: Variant | type[Variant] | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    return_aux: None = ...,
    layout: Layout = ...,
    kv_lens: Any = ...,
    lse_base: str = ...,
    backend: str | None = ...,
    **inputs: Any,
) -> torch.Tensor: ...


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    variant: Variant | type[Variant] | None = ...,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
    return_aux: None = ...,
    layout: Layout = ...,
    kv_lens: Any = ...,
    lse_base: str = ...,
    backend: str | None = ...,
    **inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, variant: Variant | type[Variant] | None = ...,
    sm_scale: float | None = ..., return_aux: Requested, layout: Layout = ..., kv_lens: Any = ...,
    lse_base: str = ..., backend: str | None = ..., **inputs: Any,
) -> tuple[torch.Tensor, AuxOutput]: ...  # fmt: skip


@overload
def attention(
    q: Any, k: Any, v: Any, *, variant: Variant | type[Variant] | None = ...,
    sm_scale: float | None = ..., return_lse: bool, return_aux: None = ..., layout: Layout = ...,
    kv_lens: Any = ..., lse_base: str = ..., backend: str | None = ..., **inputs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: Any,
    k: Any,
    v: Any,
    *more: object,
    variant: Variant | type[Variant] | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    return_aux: Requested | None = None,
    layout: Layout = "NHD",
    kv_lens: Any = None,
    lse_base: str = "e",
    backend: str | None = None,
    **inputs: Any,
) -> Any:
    """Attention over dense tensors.

    Kernels and plans are cached. A call with the previous call's lengths launches after some 0.1 to
    0.3 ms on the host, most of it for checking whether anything that the functors read has changed;
    a planned wrapper takes a fifth or less. Functors are traced again if something has changed or
    warploom cannot tell (`wl.stats().traces` counts). Values of fields may change at every call.

    Args:
        q: [batch, rows, q_heads, head_dim], or [batch, q_heads, rows, head_dim] in layout HND.
        k: [batch, keys, kv_heads, head_dim], in layout HND with keys and heads swapped; k and v are
            in q's dtype, or both in float8_e4m3fn, float8_e5m2 or int8. If batch is 1 for k and v,
            all entries of q read the same keys and values, which are not copied.
        v: [batch, keys, kv_heads, head_dim_v], in layout HND with keys and heads swapped.
        variant: the functors; None is plain attention over all keys.
        sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
        return_lse: return the log-sum-exp too.
        return_aux: an `AuxRequest`, as in FlexAttention: what to return in an `AuxOutput`, in place
            of `return_lse`.
        layout: "NHD" or "HND", of all tensors. FlexAttention and torch's SDPA use "HND"; with the
            wrong layout, a result may have the right shape and wrong numbers.
        kv_lens: int32 [batch], used keys of each entry; all by default. On a device it is copied to
            the host, which waits for the device. Queries are aligned to the end of these keys.
        lse_base: "e" or "2", base of the log-sum-exp.
        backend: "reference" evaluates the variant with NumPy; None is the device's own back end.
        **inputs: values of the variant's fields; they override those bound at construction.

    Returns:
        The output, shaped like q with v's head dimension; with `return_lse` also the log-sum-exp,
        float32, shaped like q without head dimension; with `return_aux` an `AuxOutput`. Rows that
        see no key have output 0, and -inf in the other results.

    Raises:
        WrongShape, WrongDType, WrongDevice, BadLength: a wrong tensor.
        UnknownInput, MissingInput: a wrong input.
        ArgumentError: the variant refuses these lengths, as `PackedMask` does with too few bits.
        UnsupportedSpec, BadHeadDim: no kernel supports these types or sizes.
        ForbiddenUnderCapture: a CUDA graph is being captured, and no plan of this thread for these
            lengths is free for this stream, or a host tensor of the variant was not copied yet.
    """
    if more:
        reason = "it takes q, k and v by position; name the others, such as variant=..."
        raise WrongCall(function="attention", reason=reason)
    if is_dynamo_compiling():
        lens = None if kv_lens is None else torch.as_tensor(kv_lens)
        return custom_op.compiled_attention(
            q, k, v, variant, sm_scale, return_lse, layout, lse_base, backend, lens, inputs,
            return_aux,
        )  # fmt: skip
    refuse_traced("attention")
    structure, traced = traced_once(given := as_variant(variant))
    inputs = read_inputs(given, traced, inputs)
    bound = {**given.inputs(), **inputs}
    seen = inputs | followed({name: bound[name] for name in traced.input_names if name in bound})
    if needs_operator("attention", (q, k, v, kv_lens, *seen.values())):
        lens = None if kv_lens is None else torch.as_tensor(kv_lens)
        options = sm_scale, return_lse, layout, lse_base, backend
        return through_operator(traced, variant, (q, k, v), options, lens, seen, return_aux)
    asked = None if return_aux is None else checked_request(return_aux, return_lse)
    return _attend(
        (structure, traced, given), q, k, v, sm_scale, return_lse, asked, layout, kv_lens, lse_base,
        backend, inputs, bound,
    )  # fmt: skip


@unseen
def _attend(
    variant: tuple[Hashable, TracedVariant, Variant],
    q: Any,
    k: Any,
    v: Any,
    sm_scale: float | None,
    return_lse: bool,
    asked: AuxRequest | None,
    layout: Layout,
    kv_lens: Any,
    lse_base: str,
    backend: str | None,
    inputs: dict[str, Any],
    as_given: dict[str, Any],
) -> Any:
    """`attention` of tensors that have memory; `variant` is (key, graphs, the variant itself)."""
    structure, traced, given = variant
    q, k, v = as_torch(q, "q"), as_torch(k, "k"), as_torch(v, "v")
    check_options(return_lse, lse_base, backend, q.device)
    runs = _runs(structure, given, backend)
    sizes = Sizes.of(q, k, v, layout)
    k, v = sizes.entries(k), sizes.entries(v)
    sm_scale = None if sm_scale is None else checked_scale(sm_scale, sizes.dim_qk)
    values = values_of(as_given, traced, inputs, q.device)
    kv_dtype = k.dtype if k.dtype in _NARROW else None
    tells = asked is not None and asked.max_scores
    kind = (runs, layout, sizes.shared, sizes.of_kernel, q.dtype, kv_dtype, q.device, sm_scale,
            lse_base, tells)  # fmt: skip
    counted = None if kv_lens is None else checked_lens(kv_lens, sizes, traced)

    def make() -> _Unbound:
        sizes.check(q, k, v, layout, kv_dtype)
        refuse_missing(traced, values)
        return _Unbound(
            given, kv_format=Dense(layout=layout, shared=sizes.shared),
            num_q_heads=sizes.q_heads, num_kv_heads=sizes.kv_heads, head_dim=sizes.dim_qk,
            head_dim_v=sizes.dim_v, dtype=q.dtype, kv_dtype=kv_dtype, device=q.device,
            backend=backend, sm_scale=sm_scale, lse_base=lse_base, max_scores=tells,
        )  # fmt: skip

    if sizes.batch == 0:  # a plan for no requests does not know how many rows each would have
        make()  # for its checks
        return _nothing(q, sizes, return_lse, asked)
    call = _Call(kind, q.device, sizes, counted, values)
    wrapper = _planned(call, make)
    check_lengths(given, traced, wrapper.mask_tensors, as_given, sizes, counted, layout)
    return _run(wrapper, q, (k, v), return_lse, asked, values, as_given)


def _run(
    wrapper: _Unbound,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    return_lse: bool,
    asked: AuxRequest | None,
    values: Mapping[str, Any],
    as_given: Mapping[str, Any],
) -> Any:
    at_run = {name: x for name, x in values.items() if name not in wrapper.mask_scalars}
    read = (as_given[name] for name in at_run if name not in wrapper.recorded)
    if learnt := custom_op.wanting(read):
        max_scores = MaxScores() if asked is not None and asked.max_scores else None
        wants_lse = return_lse if asked is None else asked.lse
        at_run = {name: wrapper.seen_input(name, value) for name, value in at_run.items()}
        result = custom_op.compiled_run(
            wrapper, q, kv, None, None, wants_lse, at_run, learnt, max_scores
        )
        return result if asked is None else with_aux(result, max_scores)
    if asked is not None:
        return wrapper.run(q, kv, return_aux=asked, **at_run)
    return wrapper.run(q, kv, return_lse=return_lse, **at_run)


def _nothing(q: torch.Tensor, sizes: Sizes, return_lse: bool, asked: AuxRequest | None) -> Any:
    empty = new_result(q, sizes.dim_v)
    sums, tops = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    if asked is not None:
        return empty, AuxOutput(sums if asked.lse else None, tops if asked.max_scores else None)
    return (empty, sums) if return_lse else empty


class _Unbound(AttentionWrapper):
    """A wrapper for all variants with the same graphs; each call passes all inputs."""

    _serves_calls = True

    def seen_input(self, name: str, value: Any) -> Any:
        """A value of a field as torch's operators take it."""
        return self._inputs.seen(name, value)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What determines the wrapper and the plan of one call."""

    kind: Hashable
    device: torch.device
    sizes: Sizes
    lens: np.ndarray[Any, Any] | None
    values: dict[str, Any]

    def plan_key(self, wrapper: AttentionWrapper) -> Hashable:
        scalars = tuple((name, self.values.get(name)) for name in sorted(wrapper.mask_scalars))
        lens = None if self.lens is None else self.lens.tobytes()
        return self.sizes, lens, scalars

    def plan(self, wrapper: AttentionWrapper) -> None:
        """Plan with a value for each scalar of the mask: the wrapper has those of other calls."""
        traced = wrapper.spec.variant
        refuse_missing(traced, self.values)
        sizes = self.sizes
        lens = np.full(sizes.batch, sizes.keys) if self.lens is None else self.lens
        scalars = {
            field.name: self.values.get(field.name, field.default)
            for field in traced.scalars
            if field.name in wrapper.mask_scalars
        }
        wrapper.plan(
            np.arange(sizes.batch + 1) * sizes.rows,
            np.concatenate(([0], np.cumsum(lens))),
            **scalars,
        )


@dataclasses.dataclass
class _Entry:
    """A wrapper, the key of its plan, and the tensors that captured launches read.

    Attributes:
        owner: kind of call, thread and stream of the captures that read the plan; None before.
    """

    wrapper: _Unbound
    planned: Hashable = None
    owner: Hashable = None
    read: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def keep(self, values: Mapping[str, Any]) -> _Unbound:
        """The wrapper; the tensors among `values` live as long as the entry does."""
        self.read |= {id(x): x for x in values.values() if isinstance(x, torch.Tensor)}
        return self.wrapper


_entries: OrderedDict[tuple[Hashable, tuple[int, int]], _Entry] = OrderedDict()
_captured = KeptForGraphs[_Entry]()  # their plans are read at each replay, so none plans again
_lock = forks.lock()


def _planned(call: _Call, make: Callable[[], _Unbound]) -> _Unbound:
    """The cached wrapper of this thread and stream for a call, planned for its lengths."""
    if is_capturing(call.device):
        return _pinned(call)
    on_cuda = call.device.type == "cuda"
    stream = torch.cuda.current_stream(call.device).cuda_stream if on_cuda else 0
    key = (call.kind, (threading.get_ident(), stream))
    with _lock:
        entry = _entries.get(key)
    if entry is None:
        entry = _Entry(make())
        with _lock:
            _captured.drop_released()
            _entries[key] = entry
            while len(_entries) > _LIMIT:
                _entries.popitem(last=False)
    plan_key = call.plan_key(entry.wrapper)
    if entry.planned != plan_key:
        entry.planned = None
        call.plan(entry.wrapper)
        entry.planned = plan_key
    with _lock:
        if key in _entries:
            _entries.move_to_end(key)
    return entry.wrapper


def _pinned(call: _Call) -> _Unbound:
    """A wrapper with the plan of this call, set aside for the graph that is being captured.

    It belongs to this thread: another thread could be planning or running its own right now. Only
    captures on the same stream share it, since launches on other streams may run at the same time.
    """
    thread = threading.get_ident()
    mine = call.kind, thread, raw_stream(call.device.index)
    with _lock:
        for entry in _captured:
            if entry.owner == mine and entry.planned == call.plan_key(entry.wrapper):
                _captured.keep(entry, call.device)
                return entry.keep(call.values)
        _captured.drop_released()
        for key, entry in _entries.items():
            same = (key[0], key[1][0]) == mine[:2]
            if same and entry.planned == call.plan_key(entry.wrapper):
                entry.owner = mine
                _captured.keep(_entries.pop(key), call.device)
                return entry.keep(call.values)
    raise ForbiddenUnderCapture(
        what="attention() met lengths that it has no plan for",
        remedy="Call it once with these tensors in this thread before the capture; before one on "
        "several streams, once on as many.",
    )


def _runs(structure: Hashable, given: Variant, backend: str | None) -> Hashable:
    """What a wrapper runs, as a key; the reference calls its own variant, which may change."""
    return structure, backend, id(given) if backend == "reference" else None
