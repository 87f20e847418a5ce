"""What a functor cannot do with a value of the kernel, and what to write instead.

The functions by name are kept here, too: a refusal says whether one of them is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from warploom.dsl.graphs import build
from warploom.dsl.types import location
from warploom.dsl.types.ir import Source
from warploom.error_base import take_back
from warploom.errors import CannotTrace, NoNumber

# Functions and methods that torch, NumPy and `symbol.name` may ask for; `foreign` fills it.
NAMED: dict[str, Callable[..., Any]] = {}
# What to write instead of others that are asked for; `foreign` fills it.
UNTRACED: dict[str, str] = {}
# Names for messages: what a functor may call.
PUBLIC: list[str] = []

OUTSIDE = "Declare it as a field of the variant: Tensor(dtype, axes) or Scalar(dtype)."
AS_TENSOR = "Capture a tensor instead: torch.from_numpy(array), made outside of the function."
CONCRETE = (
    "A value inside a functor is known only in the kernel. Use warploom's functions "
    "(where, exp, floor, minimum, ...), and declare tables as Tensor fields."
)
UNCHANGING = (
    "A functor changes nothing: return the new value, such as where(condition, a, b), or write the "
    "tensor before the call, outside."
)
NO_PRODUCTS = (
    "Functors have no products of matrices: multiply q, k or v by the matrix before the call. One "
    "number of the product is sum(x * self.matrix[row, at.lane])."
)
_LOOK = (
    "To look at values, record them: declare a wl.Output and return self.seen.record(logits, at)."
)
_CONVERTED = "Leave it out, or write wl.to_float(x), wl.to_int(x) or wl.to_bool(x)."

# Python's functions that ask for a number -> what to write instead of them
_CALLED = {
    "range": "The count of a loop must be a Python number: loop to a fixed limit, and choose with "
    "wl.where(i < count, a, b).",
    **dict.fromkeys(("float", "int"), _CONVERTED),
    "round": "Write torch.round(x), or wl.floor(x + 0.5).",
    "isfinite": "Write torch.isfinite(x).",
    "fabs": "Write wl.abs(x).",
    "pow": "Write x ** y.",
}
_CALL = re.compile(r"(?:math\.)?([a-z]\w*)\(")
_SURE = re.compile(r"\b(?:math\.([a-z]\w*)|(range|float|int|round))\(")  # on a line of many calls


def concrete() -> CannotTrace:
    """The error for what needs a value as a Python number, such as `math.tanh(x)`."""
    place = location.source(location.here())
    called = "" if place is None else _called(place)
    remedy = _CALLED.get(called, CONCRETE)
    if called in PUBLIC:
        remedy = f"Write wl.{called}, which kernels compute."
    what = "turning a value of the kernel into a Python number"
    return CannotTrace(what=what, remedy=remedy, source=place)


def _called(place: Source) -> str:
    """The function that is called there; a likely one before Python 3.11, which has no columns."""
    column, text = place.column, place.text
    found = _CALL.match(text, column - 1) if column else _SURE.search(text)
    return found[found.lastindex or 0] if found else ""


def formatted() -> CannotTrace:
    """The error for f"{x:.3f}"."""
    return build.refuse("formatting a value that is known only in the kernel", _LOOK)


def no_item() -> NoNumber:
    """The error for `.item`, by which libraries tell what is a number of theirs."""
    place = location.here()
    return NoNumber(
        what="turning a value of the kernel into a Python number with .item()",
        remedy="Leave it out: what is read from a tensor is used as it is.",
        is_asked_for=place is not None and location.reads_attribute(place),
        source=location.source(place),
    )


def forget_lengths() -> None:
    """Take back what was refused here: torch asks an index for its length, and goes on without."""
    take_back(location.source(location.here()))


def refuse_in_place(shown: str, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise CannotTrace for what would change a value: torch's functions that end in _."""
    if kwargs.get("inplace") or (name.endswith("_") and not name.startswith("_")):
        raise build.refuse(f"{shown} in place", "Values do not change: write x = torch.relu(x).")


def remedy_for(name: str) -> str:
    """What to write in place of a function or method that does not trace."""
    return UNTRACED.get(name) or known()


def known() -> str:
    """What a functor may use."""
    return f"Functors may use operators, {', '.join(PUBLIC)}."
