"""The escape hatch: a function given as CUDA (and C++) text, with its Python twin."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from warploom.dsl.graphs import build
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import CustomFunction
from warploom.dsl.values.symbols import Symbol, Value, as_node, wrap
from warploom.errors import ArgumentError

_recorded: ContextVar[dict[str, CustomFunction] | None] = ContextVar("recorded", default=None)


class Custom:
    """A callable for functors; make it with `custom_function`."""

    def __init__(self, spec: CustomFunction, python: Callable[..., Value]) -> None:
        self.spec = spec
        self.python = python
        self.__name__ = spec.name

    def __call__(self, *args: Value) -> Value:
        if len(args) != self.spec.arity:
            raise build.refuse(
                f"{self.spec.name} with {len(args)} arguments", f"It takes {self.spec.arity}."
            )
        if not any(isinstance(value, Symbol) for value in args):
            return self.python(*args)
        self._record()
        nodes = (build.to_kind(as_node(value), Kind.FLOAT) for value in args)
        return wrap(build.make("call", Kind.FLOAT, *nodes, attr=self.spec.name))

    def _record(self) -> None:
        recorded = _recorded.get()
        if recorded is None:
            return
        if recorded.setdefault(self.spec.name, self.spec) != self.spec:
            raise build.refuse(
                f"two different custom functions named {self.spec.name!r}", "Rename one of them."
            )


def custom_function(
    name: str, *, cuda: str, python: Callable[..., Value], cpp: str | None = None
) -> Custom:
    """Declare a float function by its source text, for what functors cannot express.

    Args:
        name: C identifier; the texts must define `WL_FN float name(float, ...)`.
        cuda: CUDA C++ text; inline PTX is allowed.
        python: the same function on NumPy arrays, for the oracle; its positional parameters give
            the number of arguments.
        cpp: C++ text for the CPU back end; None makes it refuse variants that call this.

    Returns:
        A callable for use inside functors.

    Raises:
        CannotTrace: `name` is no identifier, or a text does not define it.
        ArgumentError: `python` is no function, or a text is none.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise build.refuse(f"a custom function named {name!r}", "Its name must be a C identifier.")
    if not callable(python):
        reason = f"is {python!r}; expected the same function on NumPy arrays, for the oracle"
        raise ArgumentError(name="python", reason=reason)
    for language, text in (("cuda", cuda), ("cpp", cpp)):
        if not isinstance(text, str | None):
            reason = f"is {text!r}; expected source text that defines WL_FN float {name}(...)"
            raise ArgumentError(name=language, reason=reason)
        if text is not None and not re.search(rf"\b{name}\s*\(", text):
            raise build.refuse(
                f"custom function {name!r}", f"Its {language} text defines no {name}(...)."
            )
    arity = getattr(python, "nin", None) or len(inspect.signature(python).parameters)
    return Custom(CustomFunction(name, cuda, cpp, arity), python)


@contextmanager
def recording(into: dict[str, CustomFunction]) -> Iterator[None]:
    """Collect the custom functions that are called on symbols."""
    token = _recorded.set(into)
    try:
        yield
    finally:
        _recorded.reset(token)
