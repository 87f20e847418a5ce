"""Checks of values given for fields: which are missing, unknown, or not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from warploom.dsl.types.axes import axes_text
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.variants.variant import Variant
from warploom.errors import MissingInput, UnknownInput, UnreadInput, WrongCall, WrongShape
from warploom.hints import hint

# Arguments of plan() and run() that a user may have meant by an unknown name.
_ARGUMENTS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens", "out", "lse",
              "return_lse")  # fmt: skip
# Options of the wrapper that may be given to the wrong call -> name here; some are FlashInfer's.
_OPTIONS = {
    name: name
    for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "dtype", "kv_dtype",
                 "kv_format", "device", "sm_scale", "lse_base", "sm_limit", "backend", "bounds",
                 "workspace", "cuda_graph", "tile", "batch_invariant", "key_transform")
} | {
    "num_qo_heads": "num_q_heads",
    "head_dim_qk": "head_dim",
    "head_dim_vo": "head_dim_v",
    "use_cuda_graph": "cuda_graph",
}  # fmt: skip


def unknown_input(variant: str, name: str, fields: Sequence[str], call: str = "") -> UnknownInput:
    """The error for a value whose name is no field; `call` is empty for `plan` and `run`."""
    if call:
        found = hint(name, fields, _ARGUMENTS[1:4], call)
    elif not get_close_matches(name, fields, n=1) and (option := _OPTIONS.get(name)):
        found = f" It is an option of the wrapper: AttentionWrapper(..., {option}=...)."
    else:
        found = hint(name, fields, _ARGUMENTS, "run")
    whole = f"{call or 'attention'} without a variant" if variant == "Variant" else variant
    known = ", ".join(fields) or "nothing, since it has no fields"
    return UnknownInput(variant=whole, name=name, hint=found, known=known)


def refuse_unread(variant: Variant, read: TracedVariant, given: Mapping[str, Any]) -> None:
    """Raise UnreadInput for a value given to an append that its transforms do not read."""
    names = read.input_names
    for name in given:
        if name not in names and name not in read.unread and name in variant.fields():
            known = ", ".join(names) or "no field of it"
            found = hint(name, (), (), "append")
            raise UnreadInput(variant=variant.name, name=name, hint=found, known=known)


def stale_shape(error: WrongShape) -> WrongShape:
    """The same error for a tensor of an earlier call, which the refused call was not given."""
    name = error.facts["name"]
    remedy = (
        " It was given to an earlier plan, or bound to the variant, and stays until plan is given "
        f"another: give plan {name}=... for this batch."
    )
    facts: dict[str, Any] = {**error.facts, "remedy": remedy}
    return WrongShape(**facts)


def refuse_absent(owner: str, q: Any, kv: Any, given: Mapping[str, Any], known: set[str]) -> None:
    """Raise WrongCall for a run without q or kv, whose defaults are `...`.

    Args:
        owner: class name of the wrapper.
        q, kv: the run's arguments.
        given: the run's values of fields; a misnamed argument is among them.
        known: names of the fields.
    """
    absent = [repr(name) for name, value in (("q", q), ("kv", kv)) if value is ...]
    if not absent:
        return
    many = "required arguments" if len(absent) > 1 else "a required argument"
    reason, way = f"missing {many}: {', '.join(absent)}", " Write run(q, kv)."
    for name in given:
        if name not in known:
            reason = f"{name!r} is no argument of it; {reason}"
            way = hint(name, (), ("q", "kv", *_ARGUMENTS), "run") or way
            break
    raise WrongCall(function=f"{owner}.run", reason=reason, hint=way)


def missing_input(
    traced: TracedVariant, name: str, sizes: Mapping[str, int] | None = None
) -> MissingInput:
    """The error for a field without a value; `sizes` are the known sizes of axes."""
    kinds = {field.name: f"{field.dtype.name} number" for field in traced.scalars}
    for field in traced.tensors:
        kinds[field.name] = f"{field.dtype.name} tensor {axes_text(field, sizes or {})}"
    return MissingInput(variant=traced.name, name=name, expected=kinds[name])


def refuse_missing(traced: TracedVariant, values: Mapping[str, Any]) -> None:
    """Raise MissingInput for the first field that has neither a value nor a default."""
    defaults = {field.name for field in traced.scalars if field.default is not None}
    for name in traced.input_names:
        if name not in values and name not in defaults:
            raise missing_input(traced, name)


def read_values(
    traced: TracedVariant, given: dict[str, Any], unknown: Callable[[str], UnknownInput]
) -> dict[str, Any]:
    """The given values that graphs read; values of unread fields are ignored.

    Raises:
        UnknownInput: from `unknown`, for the first name that is no field.
    """
    if not given:
        return given
    known = traced.input_names
    for name in given:
        if name not in known and name not in traced.unread:
            raise unknown(name)
    return {name: value for name, value in given.items() if name in known}
