"""torch's view of warploom: two custom operators with fake kernels, for torch.compile.

An operator's schema knows tensors and numbers only. Wrappers and variants go in as handles: ints
under which the running process finds them. Extra inputs go in as lists, with their names in one
string.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_dynamo_compiling

from warploom import forks
from warploom.dsl.types.formats import Layout
from warploom.dsl.values.stand_ins import stands_in
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NoGradient
from warploom.runtime.inputs.aux_outputs import (
    AuxOutput,
    AuxRequest,
    MaxScores,
    Requested,
    checked_request,
)
from warploom.runtime.inputs.outputs import recorded_by, refuse_recording
from warploom.runtime.tensors.plain import is_recorded
from warploom.runtime.tensors.strides import new_result

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class Handled(Protocol):
    """What a call of the operator needs to know of a wrapper."""

    handle: int
    recorded: tuple[str, ...]


class HasRun(Protocol):  # what the operator calls
    def run(self, q: Any, kv: Any, **rest: Any) -> Any: ...


def _first_handle() -> int:
    """Where no other process begins: a graph that was saved there finds nothing here, and not
    another variant under its number.
    """
    return secrets.randbits(38) << 24


_handles = itertools.count(_first_handle())
_wrappers: WeakValueDictionary[int, HasRun] = WeakValueDictionary()
_variants: WeakValueDictionary[int, Variant | type[Variant]] = WeakValueDictionary()
_recorded: dict[int, Variant | type[Variant]] = {}  # of graphs, which hold a handle and no object
_variants_lock = forks.lock()
_NO_VARIANT = -1


def _begin_anew() -> None:
    """A forked process knows the handles that it came with, and counts on from elsewhere."""
    global _handles
    _handles = itertools.count(_first_handle())


forks.after(_begin_anew)


def register_wrapper(wrapper: HasRun) -> int:
    """Give a wrapper the handle under which the operator finds it."""
    handle = next(_handles)
    _wrappers[handle] = wrapper
    return handle


def wrapper_of(handle: int) -> HasRun:
    """The wrapper with this handle; raises ArgumentError if it is gone."""
    return _found(_wrappers, handle, "wrapper")


def _found(table: Mapping[int, T], handle: int, what: str) -> T:
    """What lives under a handle.

    Raises:
        ArgumentError: nothing; it is gone, or the graph was compiled in another process.
    """
    try:
        return table[handle]
    except KeyError:
        reason = (
            f"the {what} of a compiled graph is gone; keep it alive, or compile again. A program "
            "that another process exported or saved holds none: export it where it runs"
        )
        raise ArgumentError(name=what, reason=reason) from None


def register_variant(variant: Variant | type[Variant]) -> int:
    """The handle of a variant, which gets one at its first graph."""
    with _variants_lock:
        for handle, known in _variants.items():
            if known is variant:
                return handle
        handle = next(_handles)
        _variants[handle] = variant
        return handle


def wanting(values: Iterable[object]) -> list[torch.Tensor]:
    """Tensors whose gradient may be asked for; none where torch keeps no graph."""
    if not torch.is_grad_enabled():
        return []
    return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]


def compiled_run(
    wrapper: Handled,
    q: torch.Tensor,
    kv: Any,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    inputs: Mapping[str, Any],
    learnt: list[torch.Tensor],
    max_scores: MaxScores | None = None,
) -> Result:
    """`AttentionWrapper.run` through its operator.

    Args:
        wrapper: whose run it is.
        q, kv, out, lse, return_lse, inputs: its arguments.
        learnt: values that want a gradient.
        max_scores: takes the largest scores, if they are wanted.
    """
    if wrapper.recorded:
        from warploom.runtime.operators.constants import refuse_recorded  # brings in torch._dynamo

        refuse_recorded(wrapper.recorded[0])
    k, v = kv if isinstance(kv, (tuple, list)) else (kv[:, 0], kv[:, 1])
    wanted = return_lse or lse is not None, max_scores is not None
    o, sums, tops = run_op(q, k, v, *_pack(inputs), wrapper.handle, *wanted, learnt)
    _refuse_unlike("out", out, o)
    _refuse_unlike("lse", lse, sums)
    if max_scores is not None:
        _refuse_unlike("max_scores", max_scores.tensor, tops)
        max_scores.put(tops)
    return results(o, sums, out, lse, return_lse)


def compiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | type[Variant] | None,
    sm_scale: float | None,
    return_lse: bool,
    layout: str,
    lse_base: str,
    backend: str | None,
    kv_lens: torch.Tensor | None,
    inputs: Mapping[str, Any],
    return_aux: Requested | None = None,
) -> Result | tuple[torch.Tensor, AuxOutput]:
    """`attention` through its operator."""
    asked = (
        AuxRequest(return_lse) if return_aux is None else checked_request(return_aux, return_lse)
    )
    handle = _NO_VARIANT
    if variant is not None and is_dynamo_compiling():
        from warploom.runtime.operators.constants import handle_of  # brings in torch._dynamo

        handle = handle_of(id(variant))
        if isinstance(variant, Variant):  # so that torch orders reads of its tensors and writes
            held = variant.traceable_inputs().items()
            inputs = {**{n: x for n, x in held if isinstance(x, torch.Tensor)}, **inputs}
    elif variant is not None:
        refuse_recording(recorded_by(variant))
        handle = register_variant(variant)
        if is_recorded() or torch.compiler.is_compiling():  # by torch.export
            _recorded[handle] = variant
    packed = _pack(inputs)
    try:
        o, sums, tops = attention_op(
            q, k, v, kv_lens, *packed, handle, sm_scale, *asked, layout, lse_base, backend,
            wanting(inputs.values()),
        )  # fmt: skip
    except TypeError as error:
        raise _refused_by_subclass(error, (q, k, v, *inputs.values())) from error
    if return_aux is None:
        return results(o, sums, None, None, return_lse)
    return o, AuxOutput(sums if asked.lse else None, tops if asked.max_scores else None)


def _refused_by_subclass(error: TypeError, given: Iterable[object]) -> Exception:
    """What a subclass's `__torch_dispatch__` means that does not know the operator."""
    names = {type(x).__name__ for x in given if isinstance(x, torch.Tensor) and stands_in(x)}
    if "NotImplemented" not in str(error) or not names:
        return error
    reason = f"{', '.join(sorted(names))} does not know the operator; give plain tensors"
    return ArgumentError(name="inputs", reason=reason)


def results(
    o: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """What `run` returns, after copying to where the caller wants it."""
    o = o if out is None else out.copy_(o)
    sums = sums if lse is None else lse.copy_(sums)
    return (o, sums) if return_lse else o


def _refuse_unlike(name: str, given: torch.Tensor | None, made: torch.Tensor) -> None:
    """Refuse to copy a result into what would broadcast or convert it."""
    if given is None:
        return
    same_type = given.dtype == made.dtype and given.device == made.device
    if not same_type or given.shape != made.shape:
        from warploom.runtime.operators.constants import refuse_result  # brings in torch._dynamo

        refuse_result(name)


_Packed: TypeAlias = tuple[list[torch.Tensor], list[bool], list[int], list[float], str]


def _pack(inputs: Mapping[str, Any]) -> _Packed:
    """Inputs by type, and their names in that order."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    bools = {name: x for name, x in inputs.items() if isinstance(x, bool)}  # ints too, in Python
    ints = {name: x for name, x in inputs.items() if isinstance(x, int) and name not in bools}
    floats = {name: x for name, x in inputs.items() if isinstance(x, float)}
    packed = {**tensors, **bools, **ints, **floats}
    for name, value in inputs.items():
        if name not in packed:
            from warploom.runtime.operators.constants import refuse_input  # brings in torch._dynamo

            refuse_input(name, type(value).__name__)
    names = ",".join(packed)
    return [*tensors.values()], [*bools.values()], [*ints.values()], [*floats.values()], names


def _unpack(
    tensors: list[torch.Tensor], bools: list[bool], ints: list[int], floats: list[float], names: str
) -> dict[str, Any]:
    values = (*tensors, *bools, *ints, *floats)
    return dict(zip(names.split(",") if names else (), values, strict=True))


@torch.library.custom_op("warploom::run", mutates_args=())
def run_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: list[torch.Tensor],
    bools: list[bool],
    ints: list[int],
    floats: list[float],
    names: str,
    handle: int,
    return_lse: bool,
    return_max_scores: bool,
    learnt: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`run` of the wrapper with this handle: output, log-sum-exp and largest scores.

    What is not asked for is empty. Values that want a gradient come once more, to be refused one.
    """
    inputs = _unpack(tensors, bools, ints, floats, names)
    asked = AuxRequest(return_lse, return_max_scores)
    with torch.no_grad():
        return _three(*wrapper_of(handle).run(q, (k, v), return_aux=asked, **inputs))


@torch.library.custom_op("warploom::attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor | None,
    tensors: list[torch.Tensor],
    bools: list[bool],
    ints: list[int],
    floats: list[float],
    names: str,
    handle: int,
    sm_scale: float | None,
    return_lse: bool,
    return_max_scores: bool,
    layout: str,
    lse_base: str,
    backend: str | None,
    learnt: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention` with the variant of this handle; results as those of `run_op`."""
    from warploom.runtime.calls.attention import attention  # it dispatches to here

    with torch.no_grad():
        result = attention(
            q,
            k,
            v,
            variant=None if handle == _NO_VARIANT else _found(_variants, handle, "variant"),
            sm_scale=sm_scale,
            return_aux=AuxRequest(return_lse, return_max_scores),
            layout=cast(Layout, layout),
            lse_base=lse_base,
            backend=backend,
            kv_lens=kv_lens,
            **_unpack(tensors, bools, ints, floats, names),
        )
    return _three(*result)


def _three(out: torch.Tensor, aux: AuxOutput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums, tops = (out.new_empty(0, dtype=torch.float32) if x is None else x for x in aux)
    return out, sums, tops


@torch.library.custom_op("warploom::no_gradient", mutates_args=())
def no_gradient_op(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Raise when a gradient is asked for, and not at the call: many callers forget no_grad().

    An operator, since compilers trace a backward pass that nobody may ever run.
    """
    raise NoGradient


@no_gradient_op.register_fake
def _(gradient, shape):  # type: ignore[no-untyped-def]
    return gradient.new_empty(shape)


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """What an answer to a compiler is made of: shapes of q, k, v and what is learnt, else None.

    torch wants one None for each entry of a list of tensors.
    """
    ctx.shapes = [x.shape for x in inputs[:3]]
    ctx.rest = [[None] * len(x) if _are_tensors(x) else None for x in inputs[3:-1]]
    ctx.learnt = [x.shape for x in inputs[-1]]


def _are_tensors(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, torch.Tensor) for x in value)


def _no_backward(ctx: Any, gradient: torch.Tensor, *_: object) -> tuple[Any, ...]:
    of_tensors = (no_gradient_op(gradient, shape) for shape in ctx.shapes)
    of_values = [no_gradient_op(gradient, shape) for shape in ctx.learnt]
    return (*of_tensors, *ctx.rest, of_values)


def _no_vmap(info: Any, in_dims: Any, *_: Any) -> Any:
    """Raise: a mapped batch would need a plan of its own."""
    reason = (
        "is mapped by torch.vmap, and warploom has its own axis for that: give the mapped axis as "
        "the batch, or as more requests of one plan, outside of vmap"
    )
    names = [name for name, dim in zip("qkv", in_dims, strict=False) if dim is not None]
    raise ArgumentError(name=", ".join(names) or "an input", reason=reason)


run_op.register_vmap(_no_vmap)
attention_op.register_vmap(_no_vmap)
run_op.register_autograd(_no_backward, setup_context=_keep_shapes)
attention_op.register_autograd(_no_backward, setup_context=_keep_shapes)


def _fake(
    q: torch.Tensor, v: torch.Tensor, *asked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of the results: out is q with v's head dimension, the others are q without one."""
    out = new_result(q, v.shape[-1])
    shapes = (q.shape[:-1] if flag else (0,) for flag in asked)
    sums, tops = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return out, sums, tops


@run_op.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, tensors, bools, ints, floats, names, handle, return_lse, return_max_scores, learnt
):  # fmt: skip
    return _fake(q, v, return_lse, return_max_scores)


@attention_op.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, kv_lens, tensors, bools, ints, floats, names, handle, sm_scale, return_lse,
    return_max_scores, layout, lse_base, backend, learnt,
):  # fmt: skip
    return _fake(q, v, return_lse, return_max_scores)
