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


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function; calls that its signature refuses raise WrongCall."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            wrong = _wrong_call(function.__qualname__, signature, args, kwargs)
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
        unknown = [given for given in kwargs if given not in known]
        hints = [text for given in unknown if (text := hint(given, (), known))]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        reason = f"it takes no {unknown[0]!r}" if unknown and not takes_any else str(problem)
        return WrongCall(
            function=name.removesuffix(".__init__"), reason=reason, hint="".join(hints[:1])
        )
    return None
