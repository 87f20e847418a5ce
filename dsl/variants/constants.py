"""Notices Python numbers that functions capture and that keep changing.

Such a number is a constant of the kernel, so that each value is a kernel of its own, which takes
seconds to compile. Nothing else tells: results are right, and each call is slow.
"""

from __future__ import annotations

from types import CodeType
from weakref import WeakKeyDictionary

from warploom import forks
from warploom.dsl.variants import purity
from warploom.dsl.variants.variant import Variant
from warploom.notices import ManyConstants, warn_once

_MANY = 64  # values of one number; fewer may be those of a model's layers
_values: WeakKeyDictionary[CodeType, dict[str, set[float]]] = WeakKeyDictionary()
_lock = forks.lock()


def notice(variant: Variant) -> None:
    """Warn of numbers that functions of a variant capture, if they have had many values.

    Closures and globals are looked at, not attributes.

    Args:
        variant: was traced just now.
    """
    for (function, name), state in purity.snapshot(variant).values.items():
        if name.startswith("self.") or not isinstance(state, tuple):
            continue
        kind, *value = state
        is_number = isinstance(kind, type) and issubclass(kind, (int, float)) and kind is not bool
        if is_number and _is_last(function.__code__, name, *value):
            code = function.__code__
            subject = f"{code.co_filename}:{code.co_firstlineno} {name}"
            warn_once(subject, _text(code, name), ManyConstants)


def _is_last(code: CodeType, name: str, value: float) -> bool:
    """Keep a value of a number; whether it is the last one that is kept."""
    with _lock:
        values = _values.setdefault(code, {}).setdefault(name, set())
        is_new = value not in values and len(values) < _MANY
        values.update({value} if is_new else ())
        return is_new and len(values) == _MANY


def _text(code: CodeType, name: str) -> str:
    return (
        f"{name!r}, a Python number that {code.co_name!r} (line {code.co_firstlineno}) captures, "
        f"has had {_MANY} values. Each is a constant of a kernel that is compiled for it. Capture "
        f"a tensor in its place, as in {name} = torch.tensor(3), whose value kernels read; in a "
        "variant class, declare a wl.Scalar."
    )
