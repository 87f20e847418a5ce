"""Tensors of torch that hold no values of their own, and those who watch torch's operators.

Transforms (`torch.func`), a `FakeTensorMode`, `make_fx` and subclasses with `__torch_dispatch__`
hand out tensors that stand for others, and see each operation. What warploom reads for itself, as
the contents of a captured table, is none of theirs. Torch is asked only where it was imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _torch() -> Any:
    return sys.modules.get("torch")


def stands_in(value: Any) -> bool:
    """True if the memory that a tensor speaks of, if any, does not hold its values."""
    torch = _torch()
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        own = getattr(kind, "__torch_dispatch__", None)
        if own is not torch._C._disabled_torch_dispatch_impl:
            return True
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value))


def is_followed(value: Any) -> bool:
    """True for what stands for another tensor, or is a value of a graph that is being recorded."""
    if stands_in(value):
        return True
    torch = _torch()
    if torch is None or not torch._C._len_torch_dispatch_stack():
        return False
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or not isinstance(value, torch.Tensor):
        return False
    return value in mode.tracer.tensor_tracker


def has_memory(value: Any) -> bool:
    """True if the values of a torch tensor can be read where it says that they are."""
    is_plain = not (stands_in(value) or value.is_nested or value.is_meta)
    if not is_plain or value.layout is not _torch().strided:
        return False
    sized = zip(value.shape, value.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sized) if value.numel() else -1
    end = (value.storage_offset() + last + 1) * value.element_size()
    return last < 0 or end <= value.untyped_storage().nbytes()


@contextmanager
def unwatched() -> Iterator[None]:
    """Let nobody see what warploom does for itself: no mode, no transform, no `torch.jit.trace`."""
    torch = _torch()
    if torch is None or not is_watched():
        yield
        return
    transforms = importlib.import_module("torch._functorch.pyfunctorch")
    modes = importlib.import_module("torch.utils._python_dispatch")
    traced = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with transforms.temporarily_clear_interpreter_stack(), modes._disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(traced)


def is_watched() -> bool:
    """True if somebody sees or replaces calls of torch's operators here."""
    torch: Any = sys.modules.get("torch")  # each plan asks, so without another call
    return torch is not None and bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def uncompiled(reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that torch.compile goes around, with all that it calls.

    Args:
        reason: what it fails with under fullgraph=True, where nothing can be gone around.
    """

    def decorated(call: Callable[_P, _R]) -> Callable[_P, _R]:
        disabled: list[Callable[_P, _R]] = []

        @wraps(call)
        def around(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not disabled:  # importing it takes a second, which few need
                # another thread may be importing it
                disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
                if disable is None:
                    return call(*args, **kwargs)
                disabled.append(disable(call))
            return disabled[0](*args, **kwargs)

        marks: Any = around
        marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, reason
        return around

    return decorated


def unseen(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """The call, `unwatched`: its tensors are none of those that a graph or a mode is about."""

    @wraps(call)
    def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not is_watched():
            return call(*args, **kwargs)
        with unwatched():
            return call(*args, **kwargs)

    return within
