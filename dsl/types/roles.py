"""Roles of a tensor's dimensions: how long they must be, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.dsl.types.spec import TensorField
from warploom.errors import WrongShape

_EXACT = ("q_head", "kv_head", "lane")


def check_roles(field: TensorField, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    """Raise WrongShape unless each dimension is as long as its role asks; heads exactly so.

    Args:
        field: its roles are as many as the shape has dimensions.
        shape: of its tensor.
        sizes: length that each role asks for, 0 if the batch has none of it; one that is not there
            may be any but 0.
    """
    for role, size in zip(field.roles, shape, strict=True):
        least = sizes.get(role, 1) if role else 1
        if size < least or (role in _EXACT and role in sizes and size != least):
            raise WrongShape(name=field.name, got=shape, expected=roles_text(field, sizes))


def roles_text(field: TensorField, sizes: Mapping[str, int]) -> str:
    """The shape that a field asks for, as it is told to the user."""

    def one(role: str | None) -> str:
        if role is None or role not in sizes:
            return role or "any"
        return f"{role}{'=' if role in _EXACT else '>='}{sizes[role]}"

    return f"[{', '.join(one(role) for role in field.roles)}]"
