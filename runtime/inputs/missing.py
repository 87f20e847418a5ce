"""Values given for fields: which are missing, unknown, or read by nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from warploom.dsl.types.roles import roles_text
from warploom.dsl.types.spec import TracedVariant
from warploom.errors import MissingInput, UnknownInput


def missing_input(
    traced: TracedVariant, name: str, sizes: Mapping[str, int] | None = None
) -> MissingInput:
    """The error for a field without a value; sizes of its axes as far as they are known."""
    kinds = {field.name: f"{field.dtype.name} number" for field in traced.scalars}
    for field in traced.tensors:
        kinds[field.name] = f"{field.dtype.name} tensor {roles_text(field, sizes or {})}"
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
    """The given values that graphs read; those of fields that nothing reads are not looked at.

    Raises:
        UnknownInput: what `unknown` makes of the first name that is no field.
    """
    if not given:
        return given
    known = traced.input_names
    for name in given:
        if name not in known and name not in traced.unread:
            raise unknown(name)
    return {name: value for name, value in given.items() if name in known}
