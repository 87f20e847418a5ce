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
from warploom.dsl.values.words import Words
from warploom.error_base import take_back
from warploom.errors import CannotTrace, NoNumber

# Functions and methods that torch, NumPy and `symbol.name` may ask for; `foreign` fills it.
NAMED: dict[str, Callable[..., Any]] = {}
# What to write instead of others that are asked for; `foreign` fills it.
UNTRACED: dict[str, str | Words] = {}
# Names for messages: what a functor may call.
PUBLIC: list[str] = []

_OUTSIDE = Words(
    "Declare it as a field of the variant: Tensor(dtype, axes) or Scalar(dtype).",
    "Index it, with one int for each of its dimensions, as in table[{indices}].",
)
# examples of indices of a captured tensor, by the number of its dimensions
_INDICES = ("", "kv_idx", "h, kv_idx", "h, q_idx, kv_idx", "b, h, q_idx, kv_idx")
NO_NEW = Words(
    "A functor can make no tensors, and draw no random numbers.",
    "A score_mod or mask_mod can make no tensors, and draw no random numbers: do so before, "
    "outside.",
)
AS_TENSOR = "Capture a tensor instead: torch.from_numpy(array), made outside of the function."
CONCRETE = Words(
    "A value inside a functor is known only in the kernel. Use warploom's functions "
    "(where, exp, floor, minimum, ...), and declare tables as Tensor fields.",
    "The score, b, h, q_idx and kv_idx are known only in the kernel. They index captured tensors, "
    "but no Python list or dict: make a tensor of it before, outside of the function. In place of "
    "Python's functions of numbers write torch's.",
)
UNCHANGING = Words(
    "A functor changes nothing: return the new value, such as where(condition, a, b), or write the "
    "tensor before the call, outside.",
    "A score_mod or mask_mod changes nothing: return the new value, such as "
    "torch.where(condition, a, b), or write the tensor before the call, outside.",
)
NO_PRODUCTS = Words(
    "Functors have no products of matrices: multiply q, k or v by the matrix before the call. One "
    "number of the product is sum(x * self.matrix[row, at.lane]).",
    "In a score_mod or mask_mod there are no products of matrices: multiply q, k or v by the "
    "matrix before the call. Of short rows of captured tensors, (a[q_idx] * b[kv_idx]).sum(-1) is "
    "one.",
)
NO_PARTS = Words(
    "Functors see one element or one vector at a time; use rotate_half, sum and the like.",
    "A score_mod or mask_mod is called for one query and one key: its arguments, and what is "
    "computed of them, are single numbers, without elements or a length.",
)
ONE_PAIR = Words(
    "A functor sees one query and one key at a time: compute what runs over several before the "
    "call, outside, and read it from a Tensor field.",
    "A score_mod or mask_mod sees one query and one key at a time: compute what runs over several "
    "before the call, outside, and index it as a captured tensor.",
)
AS_TABLE = Words(
    "Compute a table before the call, outside, and read it from a Tensor field, as in "
    "self.table[to_int(x)]; a few pieces are where(x < a, ..., ...).",
    "Compute a table before the call, outside, and index it as a captured tensor, as in "
    "table[x.int()]; a few pieces are torch.where(x < a, ..., ...).",
)
_LOOK = Words(
    "To look at values, record them: declare a wl.Output and return self.seen.record(logits, at).",
    "To look at values, call the function with numbers, as in score_mod(torch.tensor(0.5), 0, 0, "
    "3, 2); to look inside a kernel, write a variant class with a wl.Output.",
)
_CONVERTED = Words(
    "Leave it out, or write wl.to_float(x), wl.to_int(x) or wl.to_bool(x).",
    "Leave it out, or write x.float(), x.int() or x.bool().",
)
_COUNTED = "The count of a loop must be a Python number: loop to a fixed limit, and choose with "
_COUNT = Words(f"{_COUNTED}wl.where(i < count, a, b).", f"{_COUNTED}torch.where(i < count, a, b).")
_NAMED = Words(
    "Write wl.{name}, which kernels compute.", "Write torch.{name}, which kernels compute."
)

# Python's functions that ask for a number -> what to write instead of them
_CALLED: dict[str, str | Words] = {
    "range": _COUNT,
    **dict.fromkeys(("float", "int"), _CONVERTED),
    "round": "Write torch.round(x).",
    "isfinite": "Write torch.isfinite(x).",
    "fabs": "Write abs(x).",
    "pow": "Write x ** y.",
}
_CALL = re.compile(r"(?:math\.)?([a-z]\w*)\(")
_SURE = re.compile(r"\b(?:math\.([a-z]\w*)|(range|float|int|round))\(")  # on a line of many calls


def indices_of(dims: int) -> str:
    """Such as "h, kv_idx", for a captured tensor of so many dimensions."""
    return _INDICES[dims] if dims < len(_INDICES) else "..."


def outside(dims: int) -> str:
    """What to do with a plain tensor of so many dimensions."""
    return str(_OUTSIDE).format(indices=indices_of(dims))


def concrete() -> CannotTrace:
    """The error for what needs a value as a Python number, such as `math.tanh(x)`."""
    place = location.source(location.here())
    called = "" if place is None else _called(place)
    remedy = str(_CALLED.get(called, CONCRETE))
    if called in PUBLIC:
        remedy = str(_NAMED).format(name=called)
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
    return str(UNTRACED.get(name) or known())


def known() -> str:
    """What a function may use."""
    of_torch = (name for name in PUBLIC if not name.startswith(("to_", "rotate_")))
    return str(
        Words(
            f"Functors may use operators, {', '.join(PUBLIC)}.",
            "A score_mod or mask_mod may use operators, .int(), .float() and .bool(), and of torch "
            f"{', '.join(of_torch)}.",
        )
    )
