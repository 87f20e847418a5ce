"""Calls that do not fit a signature, answered with what may have been meant.

Python's own words name what is missing or unknown, and not what to write. Methods that users call
often by names of other libraries are decorated with `explained`; all public classes and functions
are, when they are first asked for (`explain`). What fits costs a frame, and what is called at every
step (`run`) is not decorated: it takes any arguments, and looks at them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from warploom.errors import WrongCall
from warploom.hints import hint, meant

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ANSWERED = "_is_answered"  # of functions that are decorated
Answer = Callable[[TypeError, inspect.Signature, tuple[Any, ...], Mapping[str, Any]], WrongCall]


def answered(answer: Answer) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function: calls that its signature refuses raise another error.

    Args:
        answer: makes it of the signature's own error, the signature, and the arguments given.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                signature = inspect.signature(function)
                refusal = _refusal(signature, args, kwargs)
                if refusal is None:  # it was raised inside
                    raise
            raise answer(refusal, signature, args, kwargs)

        vars(call)[_ANSWERED] = True
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


# names that are traced into kernels: their calls are answered where they stand in the functor
_TRACED = "warploom.dsl.values.functions"
_SELF = ("self", "_cls")  # the second of named tuples
_FEW = 8  # names that a message lists
# where what other libraries give by position belongs
_WRAPPER = (
    " All but the variant need their names: num_q_heads=..., head_dim=...; the page size belongs "
    "to kv_format=warploom.Paged(page_size)."
)
_SHOWN = {"__call__": "(...)"}
_APPENDED = (
    " The order is k, v, kv, indptr, kv_indptr, kv_indices, last_page_len: rows indptr[i] to "
    "indptr[i + 1] are those of request i, in place of batch_indices and positions."
)
_BY_POSITION = {
    "AttentionWrapper": _WRAPPER,
    "PageSelectionWrapper": _WRAPPER,
    "plan": " Heads, head_dim and the page size belong to the constructor: AttentionWrapper("
    "kv_format=warploom.Paged(page_size), num_q_heads=..., head_dim=...).",
    "append": _APPENDED,
    "Appender(...)": _APPENDED,
}


def explain(home: str, name: str) -> None:
    """Decorate a public function, or the constructor of a class, in the module where it lives.

    Faces call it when a name is first asked for.
    """
    if home == _TRACED:
        return
    module = import_module(home)
    found = getattr(module, name)
    if isinstance(found, FunctionType):
        if not hasattr(found, _ANSWERED):
            setattr(module, name, explained(found))
    elif isinstance(found, type) and not issubclass(found, BaseException):
        place = "__new__" if issubclass(found, tuple) else "__init__"
        base = next(each for each in found.__mro__ if place in vars(each))
        if getattr(base, "_is_protocol", False) or not base.__module__.startswith("warploom."):
            return  # constructors that are not ours
        made = vars(base)[place]
        made = getattr(made, "__func__", made)  # of a static method, as `__new__` is one
        if isinstance(made, FunctionType) and not hasattr(made, _ANSWERED):
            decorated = explained(made, name if base is found else "")
            setattr(base, place, staticmethod(decorated) if place == "__new__" else decorated)


def explained(
    function: Callable[_P, _R], owner: str = "", refused: Callable[[Any], None] | None = None
) -> Callable[_P, _R]:
    """The function or method; calls that its signature refuses raise WrongCall.

    Args:
        function: to be decorated.
        owner: class that a constructor makes; that of the object by default.
        refused: called with the object of a method before that is raised.
    """
    name = function.__name__

    def answer(
        error: TypeError,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> WrongCall:
        taken = [each for each in signature.parameters.values() if each.name not in _SELF]
        called = name
        if len(taken) < len(signature.parameters):
            called = owner or _class_of(args[0]).__name__  # which users know
            called += "" if name in ("__init__", "__new__") else _SHOWN.get(name, f".{name}")
        reason, text = _answer(str(error), called, taken, kwargs)
        if refused is not None:
            refused(args[0])
        return WrongCall(function=called, reason=reason, hint=text)

    return answered(answer)(function)


def _class_of(first: Any) -> type:
    return first if isinstance(first, type) else type(first)


def _answer(
    refusal: str, called: str, taken: list[inspect.Parameter], kwargs: Mapping[str, Any]
) -> tuple[str, str]:
    """What is wrong with a call, and a sentence about what to write."""
    short = called if called.endswith(")") else called.rpartition(".")[2]
    named = [each for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    known = [each.name for each in named]
    hints = {
        given: meant(called, given) or hint(given, (), known, called)
        for given in kwargs
        if given not in known
    }
    if refusal.startswith("too many positional"):
        by_position = [each.name for each in named if each.kind is not each.KEYWORD_ONLY]
        listed = f"{', '.join(by_position) or 'nothing'} by position"
        return refusal, _BY_POSITION.get(short, f" {short} takes {listed}.")
    if any(each.kind is each.VAR_KEYWORD for each in taken):  # others may be the variant's inputs
        given = next((given for given, text in hints.items() if text), None)
        if given is not None:
            return f"{given!r} is no argument of it; {refusal}", hints[given]
    elif hints:
        given = next(iter(hints))
        few = f" It takes {', '.join(known)}." if 0 < len(known) <= _FEW else ""
        if "inputs" in known:
            few += f" The value of a field is given as inputs={{{given!r}: ...}}."
        return f"it takes no {given!r}", hints[given] or few
    return refusal, f" Write {short}({_needed(named)})."


def _needed(named: list[inspect.Parameter]) -> str:
    """The arguments that a call cannot do without, as they are written."""
    needed = [each for each in named if each.default is each.empty]
    shown = [f"{x.name}=..." if x.kind is x.KEYWORD_ONLY else x.name for x in needed]
    return ", ".join([*shown, *(["..."] if len(needed) < len(named) else [])])
