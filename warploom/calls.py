"""Calls that do not fit a signature, answered with what may have been meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from warploom.errors import WrongCall

_P = ParamSpec("_P")
_R = TypeVar("_R")

Answer = Callable[[TypeError, inspect.Signature, tuple[Any, ...], Mapping[str, Any]], WrongCall]


def answered(answer: Answer) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function: calls that its signature refuses raise another error.

    Args:
        answer: makes it of the signature's own error, the signature, and the arguments given.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                refusal = _refusal(signature, args, kwargs)
                if refusal is None:  # it was raised inside
                    raise
            raise answer(refusal, signature, args, kwargs)

        return call

    return decorate


def _refusal(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError | None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None
