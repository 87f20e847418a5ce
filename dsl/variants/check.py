"""Checks of a variant: its hooks' names, signatures and results."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from types import FunctionType
from typing import Any

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types import location
from warploom.dsl.types.ir import Kind, Node
from warploom.dsl.types.spec import HOOKS
from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.symbols import Symbol, Value, as_node
from warploom.dsl.variants import fields
from warploom.dsl.variants.variant import Variant
from warploom.errors import UnknownHook, WrongResult, WrongSignature

_CLOSE = 0.8  # similarity from which on a method's name counts as a misspelt hook, not a helper
_OTHER_NAMES = {"score_mod": "logits_transform", "mask_mod": "logits_mask", "mask": "logits_mask"}
# what a function of flex that returns a bool, or a number, in place of the other may have meant
_OF_FLEX = {
    "score_mod": ". Is it a mask? Then give it as mask_mod",
    "mask_mod": ". Compare, as in q_idx >= kv_idx; what is added to scores is done in a score_mod",
}


def declaration(variant: Variant) -> None:
    """Check names and signatures of a variant's hooks.

    Raises:
        UnknownHook: the name of a method or flag is similar to a hook's.
        WrongSignature: a hook cannot be called with its value and `at`, in this order.
        NoFunctor: a hook is no method, or `softmax` is no bool.
        FieldMisuse: the names of two fields clash in the kernel.
    """
    for cls in type(variant).__mro__:
        _names(variant.name, cls)
    for hook in HOOKS:
        _signature(variant, hook)
    if not isinstance(variant.softmax, bool):
        raise fields.no_functor(variant.name, "softmax", variant.softmax)
    _field_names(variant)


def _names(variant: str, cls: type) -> None:
    for name, value in vars(cls).items():
        if name.startswith("_") or name in HOOKS or name == "softmax":
            continue
        if isinstance(value, FunctionType):
            close = get_close_matches(name, HOOKS, n=1, cutoff=_CLOSE)
            suggestion = close[0] if close else _OTHER_NAMES.get(name)
        elif isinstance(value, bool):
            close = get_close_matches(name, ["softmax"], n=1, cutoff=_CLOSE)
            suggestion = close[0] if close else None
        else:
            continue
        if suggestion:
            place = location.of_function(value)
            raise UnknownHook(variant=variant, name=name, suggestion=suggestion, source=place)


def _signature(variant: Variant, hook: str) -> None:
    functor = getattr(variant, hook)
    if not callable(functor):
        raise fields.no_functor(variant.name, hook, functor)
    count = 1 if hook == "logits_mask" else 2
    got = signature_problem(functor, count, ("self",)) or _at_elsewhere(functor, count)
    if got is not None:
        raise WrongSignature(
            hook=hook,
            variant=variant.name,
            got=got,
            expected="(self, at)" if count == 1 else f"(self, {_argument(hook)}, at)",
            source=location.of_function(functor),
        )


def signature_problem(function: Any, count: int, before: tuple[str, ...] = ()) -> str | None:
    """The parameters of a function that cannot take `count` values, or None if it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature
        return "unknown parameters"
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return _shown((*before, *signature.parameters))
    return None


def _at_elsewhere(functor: Any, count: int) -> str | None:
    """The parameters of a hook in which `at` is not the last one, the position; else None."""
    names = list(inspect.signature(functor).parameters)
    return _shown(("self", *names)) if "at" in names and names.index("at") != count - 1 else None


def _shown(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"


def _argument(hook: str) -> str:
    return {"query": "q", "key": "k", "value": "v", "output": "o"}.get(hook.split("_")[0], "logits")


def _field_names(variant: Variant) -> None:
    names = variant.fields()
    for name in names:
        # kernel parameters hold sizes and strides of tensor t as t_n0, t_s0
        match = re.fullmatch(r"(.+)_[ns]\d+", name)
        if match and isinstance(names.get(match[1]), fields.Tensor):
            raise fields.misuse(variant.name, name, f"the name is taken by tensor {match[1]!r}")


def result(variant: Variant, hook: str, value: Value) -> Node:
    """The node that a hook returned.

    Raises:
        WrongResult: a mask is no bool, or a transform no number.
    """
    expected = "a bool" if hook == "logits_mask" else "a number"
    shown = _describe(value)
    if shown is None:
        found = as_node(value)
        is_bool = found.kind is Kind.BOOL
        if is_bool == (hook == "logits_mask"):
            return found if is_bool else build.to_kind(found, Kind.FLOAT)
        shown = _one(found.kind.value)
        if hook == "logits_mask":
            expected += _of_complement(value, found)
        expected += _OF_FLEX.get(variant.shown_hook(hook), "")
    elif isinstance(value, ReadInParts):
        expected += f". {value.remedy().rstrip('.')}"
    place = value.source if isinstance(value, Symbol) else None
    raise WrongResult(
        hook=variant.shown_hook(hook),
        variant=variant.name,
        got=shown,
        expected=expected,
        source=place or location.of_function(variant.functor(hook)),
    )


def _of_complement(value: Value, found: Node) -> str:
    """A remark about `~`, where a mask is one of what is no bool of the kernel."""
    if isinstance(value, int) and value in (-1, -2):
        return " (of a bool of Python's own `~` makes a number: write `not`)"
    is_complement = found.op == "bitxor" and any(
        one.op == "const" and one.attr == -1 for one in found.args
    )
    return " (`~` of an int is an int)" if is_complement else ""


def checked(variant: Variant, hook: str, value: Value) -> Value:
    """A link's result; a wrong one is refused here, not where a chain combines it."""
    if not isinstance(value, Symbol) and hasattr(value, "dtype"):
        return array_result(variant, hook, value)
    result(variant, hook, value)
    return value


def array_result(variant: Variant, hook: str, value: Value) -> Value:
    """The same check in the NumPy reading, by dtype."""
    kinds = "b" if hook == "logits_mask" else "iuf"
    dtype = np.asarray(value).dtype
    if dtype.kind not in kinds:
        raise WrongResult(
            hook=variant.shown_hook(hook),
            variant=variant.name,
            got=f"values of {dtype}",
            expected="bools" if kinds == "b" else "numbers",
            source=location.of_function(variant.functor(hook)),
        )
    return value


def _describe(value: Value) -> str | None:
    """A description of a result that cannot become a node; None if it can."""
    if isinstance(value, (Symbol, bool, int, float)):
        return None
    if isinstance(value, ReadInParts):
        return f"the whole of {value.described()}"
    if getattr(value, "ndim", None) == 0:
        return None
    return "None (is a return missing?)" if value is None else _one(type(value).__name__)


def _one(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"
