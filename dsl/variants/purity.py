"""Finds functors with side effects: compares snapshots of the state they can reach."""

from __future__ import annotations

import dis
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from warploom.dsl.types import location
from warploom.dsl.types.ir import Source
from warploom.dsl.values.symbols import Symbol
from warploom.dsl.variants.capture import writes
from warploom.dsl.variants.code_names import closed_over, names
from warploom.dsl.variants.variant import Variant
from warploom.errors import GlobalMutated

_LIBRARIES = ("numpy", "torch", "warploom")  # taken to be pure
_MAX_BYTES = 1 << 16  # larger arrays are compared by identity only


@dataclass(frozen=True)
class Snapshot:
    """State of everything that a variant's functors can reach by name.

    Attributes:
        functions: the functors and the helpers they call, each with the hook it was reached from.
        values: (function, name) -> state of the name's value.
        alive: the objects, kept alive since states contain their ids.
    """

    functions: dict[FunctionType, str]
    values: dict[tuple[FunctionType, str], Hashable]
    alive: list[object]

    def record(self, function: FunctionType, name: str, value: object) -> None:
        self.values[function, name] = _state(value)
        self.alive.append(value)


def snapshot(variant: Variant) -> Snapshot:
    """Record the state that the functors of a variant can reach."""
    functions = _functions(variant)
    taken = Snapshot(functions, {}, [])
    for function in functions:
        for name, value in reachable(function):
            taken.record(function, name, value)
    for _, functor in variant.functors():
        if isinstance(functor, MethodType) and functor.__func__ in functions:
            for name, value in getattr(functor.__self__, "__dict__", {}).items():
                taken.record(functor.__func__, f"self.{name}", value)
    return taken


def compare(variant: Variant, before: Snapshot) -> None:
    """Raise GlobalMutated if anything recorded has changed since."""
    after = snapshot(variant)
    for key, state in before.values.items():
        if after.values.get(key) != state:
            function, name = key
            raise GlobalMutated(
                hook=before.functions[function],
                variant=variant.name,
                name=name,
                source=_line_of(before.functions, name) or location.of_function(function),
            )


def _functions(variant: Variant) -> dict[FunctionType, str]:
    """The hooks' functions and, through the names in their code, the helpers they call."""
    found: dict[FunctionType, str] = {}

    def visit(candidate: object, hook: str, owner: type) -> None:
        function = candidate
        if isinstance(candidate, (MethodType, staticmethod, classmethod)):
            function = candidate.__func__
        if not isinstance(function, FunctionType) or function in found:
            return
        if is_library(function.__module__ or ""):
            return
        found[function] = hook
        for _, value in reachable(function):
            visit(value, hook, owner)
        for name in names(function.__code__):
            visit(getattr(owner, name, None), hook, owner)

    for hook, functor in variant.functors():
        visit(functor, hook, type(getattr(functor, "__self__", None)))
    return found


def is_library(module: str) -> bool:
    """True for modules whose functions are taken to be pure."""
    return module.partition(".")[0] in _LIBRARIES


def reachable(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Globals, members of the user's modules, and closure cells that a function's code names."""
    used = list(names(function.__code__))
    for name in used:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not is_library(value.__name__):
            yield from ((inner, vars(value)[inner]) for inner in used if inner in vars(value))
        elif name in function.__globals__:
            yield name, value
    yield from closed_over(function)


def _state(value: Any) -> Hashable:
    """A key that differs after the value was changed in place or rebound."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return type(value), value
    if isinstance(value, Symbol):  # it has no attributes to be asked for
        return id(value)
    if isinstance(value, dict):
        return id(value), tuple((id(key), id(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), tuple(map(id, value))
    if isinstance(value, (ModuleType, FunctionType, type)):
        return id(value)
    version = writes(value)
    if version is not None:
        return id(value), version
    if getattr(value, "nbytes", _MAX_BYTES) < _MAX_BYTES and hasattr(value, "tobytes"):
        return id(value), value.tobytes()
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict):
        return id(value), tuple((name, id(item)) for name, item in inner.items())
    return id(value)


def _line_of(functions: dict[FunctionType, str], name: str) -> Source | None:
    """The line that stores `name`, or else the first line that mentions it."""
    mentioned: Source | None = None
    name = name.removeprefix("self.")
    for function in functions:
        line = function.__code__.co_firstlineno
        for step in dis.get_instructions(function.__code__):
            line = location.line_of(step) or line
            if step.argval != name:
                continue
            found = location.at_line(function.__code__, line)
            if step.opname.startswith("STORE"):
                return found
            mentioned = mentioned or found
    return mentioned
