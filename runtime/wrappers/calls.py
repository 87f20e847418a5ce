"""Calls of wrappers that do not fit, answered with the argument that may have been meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from warploom.calls import answered
from warploom.errors import WrongCall
from warploom.hints import hint

_P = ParamSpec("_P")
_R = TypeVar("_R")

# where what other libraries give by position belongs
_BY_NAME = {
    "plan": " Heads, head_dim and the page size belong to the constructor: AttentionWrapper("
    "kv_format=warploom.Paged(page_size), num_q_heads=..., head_dim=...).",
    "__init__": " All but the variant need their names: num_q_heads=..., head_dim=...; the page "
    "size belongs to kv_format=warploom.Paged(page_size).",
}


def explained(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method; calls that its signature refuses raise WrongCall."""
    name = method.__name__

    def answer(
        error: TypeError,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> WrongCall:
        known = list(signature.parameters)
        hints = {given: hint(given, (), known) for given in kwargs if given not in known}
        reason = str(error)
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            # others may be inputs of the variant
            hints = {given: text for given, text in hints.items() if text}
            reason = f"{next(iter(hints))!r} is no argument of it; {reason}" if hints else reason
        elif hints:
            reason = f"it takes no {next(iter(hints))!r}"
        if reason.startswith("too many positional"):
            hints = {"": _BY_NAME.get(name, "")}
        owner = type(args[0]).__name__  # the class that users know
        function = owner if name == "__init__" else f"{owner}.{name}"
        return WrongCall(function=function, reason=reason, hint=next(iter(hints.values()), ""))

    return answered(answer)(method)
