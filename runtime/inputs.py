"""A variant's extra scalars and tensors: where their values come from, checks, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.dsl.ir import Kind
from warploom.dsl.spec import ScalarField, TensorField, TracedVariant
from warploom.errors import (
    ArgumentError,
    MissingInput,
    PlanMismatch,
    UnknownInput,
    WrongDevice,
    WrongDType,
    WrongShape,
)
from warploom.runtime.args import Geometry
from warploom.runtime.formats import Batch
from warploom.runtime.params import ParamBlock
from warploom.runtime.tensors import as_torch

Number = bool | int | float


class Inputs:
    """Values of one wrapper's extra inputs.

    They come from the variant's construction, then from `plan`, then from `run`; the later wins. What
    `run` gives holds for that run only.

    Attributes:
        scalars: planned values by name.
        tensors: planned tensors by name, on the wrapper's device.
        known: host values of planned tensors, where they were given on the host.
    """

    def __init__(
        self,
        traced: TracedVariant,
        bound: Mapping[str, Any],
        geometry: Geometry,
        mask_scalars: frozenset[str],
    ) -> None:
        self._name = traced.name
        self._scalar_fields = {field.name: field for field in traced.scalars}
        self._tensor_fields = {field.name: field for field in traced.tensors}
        self._geometry = geometry
        self._mask_scalars = mask_scalars
        self._sizes: dict[str, int] = {}
        self.scalars: dict[str, Number] = {
            field.name: field.default for field in traced.scalars if field.default is not None
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self.known: dict[str, np.ndarray] = {}
        self._overridden: tuple[str, ...] = ()
        self._bind({name: value for name, value in bound.items() if name in self._names()})

    def _names(self) -> list[str]:
        return [*self._scalar_fields, *self._tensor_fields]

    def plan(self, given: Mapping[str, Any], batch: Batch) -> None:
        """Take the inputs given to `plan`, and check every known tensor against the batch.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
            MissingInput: the mask needs a scalar that has no value.
        """
        self._bind(given)
        self._sizes = role_sizes(self._geometry, batch)
        for name, tensor in self.tensors.items():
            self._check_sizes(self._tensor_fields[name], tensor)
        for name in sorted(self._mask_scalars - self.scalars.keys()):
            raise self._missing(name)

    def write_planned(self, block: ParamBlock) -> None:
        """Write all planned values."""
        for name, value in self.scalars.items():
            block.set(f"x_{name}", value)
        for name, tensor in self.tensors.items():
            _write_tensor(block, name, tensor)
        self._overridden = ()

    def write_given(
        self, given: Mapping[str, Any], block: ParamBlock
    ) -> tuple[torch.Tensor, ...]:
        """Write the values given to `run`, after undoing those of the run before.

        Returns the given tensors, which must live until the launch.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
            PlanMismatch: a scalar of the mask has another value than at `plan`.
            MissingInput: an input has no value from anywhere.
        """
        if self._overridden:
            self.write_planned(block)
        scalars, tensors = self.check_given(given)
        for name, value in scalars.items():
            block.set(f"x_{name}", value)
        for name, tensor in tensors.items():
            _write_tensor(block, name, tensor)
        self._overridden = tuple(given)
        return tuple(tensors.values())

    def check_given(
        self, given: Mapping[str, Any]
    ) -> tuple[dict[str, Number], dict[str, torch.Tensor]]:
        """Check the inputs of one run; returns its scalars and its tensors."""
        scalars: dict[str, Number] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in given.items():
            if name in self._tensor_fields:
                field = self._tensor_fields[name]
                tensor = as_torch(value, name)
                self._check_type(field, tensor)
                self._check_sizes(field, tensor)
                tensors[name] = tensor
            else:
                scalars[name] = self._scalar(name, value)
                if name in self._mask_scalars and scalars[name] != self.scalars.get(name):
                    raise PlanMismatch(name=name, got=value, expected=self.scalars.get(name))
        for name in self._names():
            if not (name in given or name in self.scalars or name in self.tensors):
                raise self._missing(name)
        return scalars, tensors

    @property
    def incomplete(self) -> bool:
        """True if `run` must give something."""
        return any(name not in self.scalars and name not in self.tensors for name in self._names())

    def _bind(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if name in self._tensor_fields:
                self._bind_tensor(self._tensor_fields[name], value)
            else:
                self.scalars[name] = self._scalar(name, value)

    def _bind_tensor(self, field: TensorField, value: Any) -> None:
        """Keep a tensor; one from the host is copied to the device, and its values stay known."""
        if isinstance(value, (list, tuple, int, float)):
            value = torch.as_tensor(value, dtype=getattr(torch, field.dtype.name))
        tensor = as_torch(value, field.name).detach()
        on_host = tensor.device.type == "cpu"
        if on_host and tensor.dtype != torch.bfloat16:
            self.known[field.name] = tensor.numpy()
        else:
            self.known.pop(field.name, None)
        moved = tensor.to(self._geometry.device) if on_host else tensor
        self._check_type(field, moved)
        old = self.tensors.get(field.name)
        if moved is not tensor and old is not None and old.shape == moved.shape:
            old.copy_(moved)  # the address stays, so that a captured graph sees the new values
        else:
            self.tensors[field.name] = moved

    def _scalar(self, name: str, value: Any) -> Number:
        field = self._scalar_fields.get(name)
        if field is None:
            raise UnknownInput(
                variant=self._name, name=name, known=", ".join(self._names()) or "none"
            )
        return checked_scalar(field, value)

    def _check_type(self, field: TensorField, tensor: torch.Tensor) -> None:
        expected = getattr(torch, field.dtype.name)
        if tensor.dtype != expected:
            raise WrongDType(name=field.name, got=str(tensor.dtype), expected=str(expected))
        if tensor.device != self._geometry.device:
            raise WrongDevice(
                name=field.name, got=str(tensor.device), expected=str(self._geometry.device)
            )
        if tensor.dim() != len(field.roles):
            raise WrongShape(
                name=field.name, got=tuple(tensor.shape), expected=_roles_text(field, {})
            )

    def _check_sizes(self, field: TensorField, tensor: torch.Tensor) -> None:
        for role, size in zip(field.roles, tensor.shape, strict=True):
            least = self._sizes.get(role, 0) if role else 0
            exact = role in ("q_head", "kv_head")
            if size < least or (exact and self._sizes and size != least) or size == 0:
                raise WrongShape(
                    name=field.name,
                    got=tuple(tensor.shape),
                    expected=_roles_text(field, self._sizes),
                )

    def _missing(self, name: str) -> MissingInput:
        if name in self._tensor_fields:
            field = self._tensor_fields[name]
            expected = f"a {field.dtype.name} tensor {_roles_text(field, self._sizes)}"
        else:
            expected = f"a {self._scalar_fields[name].dtype.name} number"
        return MissingInput(variant=self._name, name=name, expected=expected)


def checked_scalar(field: ScalarField, value: Any) -> Number:
    """A number of the field's kind.

    Raises:
        WrongDType: the value is no number, or not of an integer kind where one is declared.
    """
    if isinstance(value, (np.generic, torch.Tensor)):
        value = value.item()
    kind = field.dtype.kind
    allowed = {Kind.FLOAT: (bool, int, float), Kind.INT: (int,), Kind.BOOL: (bool,)}[kind]
    if not isinstance(value, allowed):
        raise WrongDType(
            name=field.name, got=type(value).__name__, expected=f"a {field.dtype.name} number"
        )
    if kind is Kind.INT and not -(2**31) <= value < 2**31:
        raise ArgumentError(name=field.name, reason=f"{value} does not fit into int32")
    return float(value) if kind is Kind.FLOAT else value  # type: ignore[no-any-return]


def role_sizes(geometry: Geometry, batch: Batch) -> dict[str, int]:
    """How long a dimension of each role must be for this batch; heads exactly, others at least."""
    return {
        "batch": batch.num_requests,
        "q_head": geometry.num_q_heads,
        "kv_head": geometry.num_kv_heads,
        "kv_pos": batch.max_kv_len,
        "q_pos": batch.max_kv_len,
        "kv_len": batch.max_kv_len,
        "q_idx": int(batch.q_lens.max(initial=0)),
        "q_row": int(batch.q_lens.sum()),
        "lane": min(geometry.head_dim_qk, geometry.head_dim_v),
    }


def _roles_text(field: TensorField, sizes: Mapping[str, int]) -> str:
    def one(role: str | None) -> str:
        if role is None or role not in sizes:
            return role or "any"
        return f"{role}{'=' if role in ('q_head', 'kv_head') else '>='}{sizes[role]}"

    return f"[{', '.join(one(role) for role in field.roles)}]"


def _write_tensor(block: ParamBlock, name: str, tensor: torch.Tensor) -> None:
    block.set(f"x_{name}", tensor.data_ptr())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        block.set(f"x_{name}_n{axis}", size)
        block.set(f"x_{name}_s{axis}", stride)
