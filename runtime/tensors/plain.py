"""Tensors that only stand for one, and those who watch or replace the calls of operators.

A kernel takes addresses. A tensor of torch's transforms (`torch.func`), of a `FakeTensorMode` or of
a subclass with `__torch_dispatch__` has none: its values lie elsewhere, or nowhere. Calls with such
tensors go through warploom's operators, for which torch knows what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from warploom.dsl.values.stand_ins import is_followed, stands_in
from warploom.errors import ArgumentError, NoGradient, WrongCall

_P = ParamSpec("_P")
_R = TypeVar("_R")

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  (it has no stub)
modes = torch._C._len_torch_dispatch_stack  # how many modes see each operator
_KINDS = (torch.Tensor, torch.nn.Parameter)  # most tensors are one of these


def refuse_stand_in(tensor: torch.Tensor, name: str) -> None:
    """Raise ArgumentError for a tensor whose address means nothing, and say what it is.

    One with a tangent, which would be lost, raises NoGradient.
    """
    if _has_tangent(tensor):
        raise NoGradient
    if not stands_in(tensor):
        return
    kind = type(tensor).__name__
    if kind == "FakeTensor":
        reason = "is a FakeTensor, which has no values; give a real one here"
    elif _functorch.is_batchedtensor(tensor):
        reason = "is mapped by torch.vmap; call it for the whole batch, outside of vmap"
    elif type(tensor) in _KINDS:
        reason = "is under a transform of torch.func; give a tensor from outside of it"
    else:
        reason = f"is a {kind}, whose values lie elsewhere; give the plain tensor that has them"
    raise ArgumentError(name=name, reason=reason)


def refuse_freed(tensor: torch.Tensor, name: str, span: int) -> None:
    """Raise ArgumentError for a tensor whose storage is too small for it, as of a freed one.

    Args:
        tensor: with memory of its own.
        name: for messages.
        span: bytes from its first element to the end of its last.
    """
    held = tensor.untyped_storage().nbytes()
    offset = tensor.storage_offset() * tensor.element_size()
    if span and offset + span > held:
        reason = f"needs {offset + span} bytes of its storage, which has {held}"
        raise ArgumentError(
            name=name, reason=f"{reason}; was it freed? Give a tensor that is alive"
        )


def unrecorded(function: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Refuse a function that writes in place where a graph is made, which would not repeat it.

    Args:
        function: its name, for the WrongCall that is raised then.
    """

    def wrapped(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(call)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            key = torch._C._TorchDispatchModeKey.PROXY
            if is_traced() or (modes() and torch._C._get_dispatch_mode(key) is not None):
                reason = "no recorded graph repeats what it writes; call it outside of the graph"
                raise WrongCall(function=function, reason=reason)
            return call(*args, **kwargs)

        return checked

    return wrapped


def is_traced() -> bool:
    """True within torch.jit.trace."""
    return torch._C._get_tracing_state() is not None


def is_recorded() -> bool:
    """True if calls of operators are recorded: by make_fx, or a mode of the user's.

    A FakeTensorMode records nothing, and makes nothing of calls with real tensors.
    """
    seeing = modes()
    if seeing and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        seeing -= 1
    return seeing > 0


def refuse_traced(function: str) -> None:
    """Raise WrongCall within torch.jit.trace."""
    if is_traced():
        reason = "torch.jit.trace cannot hold it; use torch.compile or torch.export"
        raise WrongCall(function=function, reason=reason)


def followed(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Bound values that an operator must be given, or that have a tangent; all others it reads."""
    return {
        name: x
        for name, x in bound.items()
        if isinstance(x, torch.Tensor) and (is_followed(x) or _has_tangent(x))
    }


def needs_operator(function: str, values: Iterable[Any]) -> bool:
    """True if a call with these must go through an operator.

    Args:
        function: its name, for messages.
        values: all that it is given.

    Raises:
        NoGradient: a transform or forward-mode differentiation asks for a derivative.
        WrongCall: within torch.jit.trace.
        ArgumentError: fake tensors and real ones.
    """
    refuse_traced(function)
    tensors = [x for x in values if isinstance(x, torch.Tensor) and not x.is_nested]
    if any(map(_has_tangent, tensors)):
        raise NoGradient
    if not any(map(stands_in, tensors)):
        return is_recorded()
    if any(map(_is_differentiated, tensors)):
        raise NoGradient
    _refuse_mixture(tensors)
    return True


def _refuse_mixture(tensors: list[torch.Tensor]) -> None:
    fakes = [x for x in tensors if type(x).__name__ == "FakeTensor"]
    if not fakes or all(map(stands_in, tensors)):
        return
    if not getattr(fakes[0], "fake_mode").allow_non_fake_inputs:  # noqa: B009
        reason = "a FakeTensor beside real ones: make all of them fake, with mode.from_tensor(x)"
        raise ArgumentError(name="inputs", reason=reason)


def _has_tangent(tensor: torch.Tensor) -> bool:
    if forward_ad._current_level < 0 or tensor.is_nested:
        return False
    unpack: Any = forward_ad.unpack_dual
    return unpack(tensor).tangent is not None


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func follows the tensor's derivative, at any level."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False
