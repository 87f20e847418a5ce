"""Calls that do not fit a signature, answered with the argument that may have been meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

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


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method; calls that its signature refuses raise WrongCall."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            wrong = _wrong_call(function.__name__, signature, args, kwargs)
            if wrong is None:  # it was raised inside
                raise
        raise wrong

    return call


def _wrong_call(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WrongCall | None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        known = list(signature.parameters)
        hints = {given: hint(given, (), known) for given in kwargs if given not in known}
        reason = str(problem)
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            # others may be inputs of the variant
            hints = {given: text for given, text in hints.items() if text}
            reason = f"{next(iter(hints))!r} is no argument of it; {reason}" if hints else reason
        elif hints:
            reason = f"it takes no {next(iter(hints))!r}"
        if reason.startswith("too many positional"):
            hints = {"": _BY_NAME.get(name, "")}
        owner = type(args[0]).__name__  # the class that users know
        return WrongCall(
            function=owner if name == "__init__" else f"{owner}.{name}",
            reason=reason,
            hint=next(iter(hints.values()), ""),
        )
    return None
