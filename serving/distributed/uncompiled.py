"""Calls that torch.compile leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function; where torch.compile traces a call of it, one graph ends and another begins.

    Traced, it would be given tensors that stand for others, and these cannot be sent. Marking a
    function imports torch._dynamo, which takes seconds, so that it is done while it is there.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disable: Any = torch.compiler.disable  # which is not typed
            marked: Callable[P, R] = disable(function)
            return marked(*args, **kwargs)
        return function(*args, **kwargs)

    return call
