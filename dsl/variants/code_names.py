"""Names that the code of a function contains, without running it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType


def names(code: CodeType) -> Iterator[str]:
    """Global and attribute names in a function's code and in the functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names(inner)


def closed_over(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Names that a function closes over, and what they hold; those not bound yet are left out."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue


@functools.lru_cache(1024)
def global_names(code: CodeType) -> frozenset[str]:
    """Names in a function's code, and in functions inside it, that are looked up as globals."""
    loads = (step for step in dis.get_instructions(code) if step.opname.startswith("LOAD_"))
    found = {str(x.argval) for x in loads if "GLOBAL" in x.opname or x.opname == "LOAD_NAME"}
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(found).union(*map(global_names, inner))


@functools.lru_cache(1024)
def imports(code: CodeType) -> tuple[str, ...]:
    """Modules that a function's code, and functions inside it, import when they run.

    A relative import is returned as ".", which is no module's name.
    """
    found: dict[str, None] = {}
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":  # pushed before it: the level, and the names imported
            found[step.argval if steps[at - 2].argval == 0 else "."] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= dict.fromkeys(imports(inner))
    return tuple(found)
