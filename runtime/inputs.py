"""A variant's extra scalars and tensors: where values come from, checks, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.dsl.ir import Kind, walk
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

_EXACT = ("q_head", "kv_head")


class Inputs:
    """Values of one wrapper's extra inputs.

    They come from the variant's construction, then from `plan`, then from `run`; the later wins.
    What `run` gives holds for that run only. Tensors that the mask reads and that are given on the
    host are copied: the plan is made for those values, so the kernel must see the same.

    Attributes:
        scalars: planned values by name.
        tensors: planned tensors by name, on the wrapper's device.
        known: host values of planned tensors that the mask reads.
        overridden: the last run gave values of its own, which must be undone.
    """

    def __init__(self, traced: TracedVariant, geometry: Geometry, max_requests: int = 0) -> None:
        """Begin with the defaults.

        Args:
            traced: the variant.
            geometry: heads and device that tensors must agree with.
            max_requests: declared bound; tensors copied by request get this size, so that their
                address serves all batches.
        """
        self._name = traced.name
        self._scalar_fields = {field.name: field for field in traced.scalars}
        self._tensor_fields = {field.name: field for field in traced.tensors}
        self._geometry = geometry
        self._max_requests = max_requests
        mask = traced.seats.get("logits_mask")
        nodes = [] if mask is None else list(walk(mask))
        self.mask_scalars = frozenset(str(n.attr) for n in nodes if n.op == "scalar")
        self._mask_tensors = frozenset(str(n.attr) for n in nodes if n.op == "load")
        self._sizes: dict[str, int] = {}
        self.scalars: dict[str, Number] = {
            field.name: field.default for field in traced.scalars if field.default is not None
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self.known: dict[str, np.ndarray[Any, Any]] = {}
        self.overridden = False

    @property
    def names(self) -> list[str]:
        return [*self._scalar_fields, *self._tensor_fields]

    @property
    def incomplete(self) -> bool:
        """True if `run` must give something."""
        return any(name not in self.scalars and name not in self.tensors for name in self.names)

    def bind(self, given: Mapping[str, Any]) -> None:
        """Keep values for the runs to come.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
        """
        for name, value in given.items():
            if name in self._tensor_fields:
                self._bind_tensor(self._tensor_fields[name], value)
            else:
                self.scalars[name] = self._scalar(name, value)

    def for_batch(self, batch: Batch) -> None:
        """Take the lengths that tensors are checked against."""
        self._sizes = role_sizes(self._geometry, batch)

    def check_planned(self) -> None:
        """Check what is kept against the lengths.

        Raises:
            WrongShape: a tensor is too small.
            MissingInput: the mask needs a scalar that has no value.
        """
        for name, tensor in self.tensors.items():
            self._check_sizes(self._tensor_fields[name], tensor)
        for name in sorted(self.mask_scalars - self.scalars.keys()):
            raise self._missing(name)

    def write_planned(self, block: ParamBlock) -> None:
        """Write all kept values."""
        for name, value in self.scalars.items():
            block.set(f"x_{name}", value)
        for name, tensor in self.tensors.items():
            _write_tensor(block, name, tensor)
        self.overridden = False

    def write_given(self, given: Mapping[str, Any], block: ParamBlock) -> tuple[torch.Tensor, ...]:
        """Write the values given to `run`, after undoing those of the run before.

        Returns the given tensors, which must live until the launch.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
            PlanMismatch: the mask reads it and `plan` was made for another value.
            MissingInput: an input has no value from anywhere.
        """
        if self.overridden:
            self.write_planned(block)
        values = self.check_given(given)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                _write_tensor(block, name, value)
            else:
                block.set(f"x_{name}", value)
        self.overridden = bool(values)
        return tuple(value for value in values.values() if isinstance(value, torch.Tensor))

    def check_given(self, given: Mapping[str, Any]) -> dict[str, Number | torch.Tensor]:
        """Check the inputs of one run; errors as for `write_given`."""
        values: dict[str, Number | torch.Tensor] = {}
        for name, value in given.items():
            if name in self._tensor_fields:
                field = self._tensor_fields[name]
                if name in self.known and value is not self.tensors[name]:
                    raise PlanMismatch(name=name, got="another tensor", expected="its own values")
                tensor = as_torch(value, name)
                self._check_type(field, tensor)
                self._check_sizes(field, tensor)
                values[name] = tensor
            else:
                values[name] = self._scalar(name, value)
                if name in self.mask_scalars and values[name] != self.scalars[name]:
                    raise PlanMismatch(name=name, got=value, expected=self.scalars[name])
        for name in self.names:
            if not (name in given or name in self.scalars or name in self.tensors):
                raise self._missing(name)
        return values

    def _bind_tensor(self, field: TensorField, value: Any) -> None:
        name = field.name
        tensor = as_input(field, value)
        self.known.pop(name, None)
        if tensor.device.type != "cpu":
            self._check_type(field, tensor)
            self.tensors[name] = tensor
            return
        if name in self._mask_tensors:
            tensor = self._padded(field, tensor).clone()
            self.known[name] = tensor.numpy()
        old = self.tensors.get(name)
        if old is not None and old.device.type != "cpu" and old.shape == tensor.shape:
            self._check_type(field, tensor, tensor.device)
            old.copy_(tensor)  # the address stays, so that a captured graph sees the new values
            return
        self.tensors[name] = tensor.to(self._geometry.device)
        self._check_type(field, self.tensors[name])

    def _padded(self, field: TensorField, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros behind the last request, up to the declared bound."""
        if field.roles[:1] != ("batch",) or len(tensor) >= self._max_requests:
            return tensor
        rest = tensor.new_zeros(self._max_requests - len(tensor), *tensor.shape[1:])
        return torch.cat((tensor, rest))

    def _scalar(self, name: str, value: Any) -> Number:
        field = self._scalar_fields.get(name)
        if field is None:
            raise UnknownInput(
                variant=self._name, name=name, known=", ".join(self.names) or "nothing"
            )
        return checked_scalar(field, value)

    def _check_type(
        self, field: TensorField, tensor: torch.Tensor, device: torch.device | None = None
    ) -> None:
        device = self._geometry.device if device is None else device
        expected = getattr(torch, field.dtype.name)
        if tensor.dtype != expected:
            raise WrongDType(name=field.name, got=str(tensor.dtype), expected=str(expected))
        if tensor.device != device:
            raise WrongDevice(name=field.name, got=str(tensor.device), expected=str(device))
        if tensor.dim() != len(field.roles):
            raise WrongShape(
                name=field.name, got=tuple(tensor.shape), expected=_roles_text(field, {})
            )

    def _check_sizes(self, field: TensorField, tensor: torch.Tensor) -> None:
        for role, size in zip(field.roles, tensor.shape, strict=True):
            least = self._sizes.get(role, 0) if role else 0
            if size < max(least, 1) or (role in _EXACT and size != least):
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
        WrongDType: the value is no number, or not an integer where one is declared.
        ArgumentError: an integer beyond int32.
    """
    if isinstance(value, (np.generic, torch.Tensor)):
        value = value.item()
    kind = field.dtype.kind
    allowed = {Kind.FLOAT: (int, float), Kind.INT: (int,), Kind.BOOL: (bool,)}[kind]
    if not isinstance(value, allowed):
        raise WrongDType(
            name=field.name, got=type(value).__name__, expected=f"a {field.dtype.name} number"
        )
    if kind is Kind.INT and not -(2**31) <= value < 2**31:
        raise ArgumentError(name=field.name, reason=f"{value} does not fit into int32")
    number: Number = float(value) if kind is Kind.FLOAT else value
    return number


def role_sizes(geometry: Geometry, batch: Batch) -> dict[str, int]:
    """Length of a dimension of each role for this batch: heads exactly, others at least."""
    return {
        "batch": batch.num_requests,
        "q_head": geometry.num_q_heads,
        "kv_head": geometry.num_kv_heads,
        "kv_pos": batch.max_kv_len,
        "q_pos": batch.max_kv_len,
        "q_row": int(batch.q_lens.sum()),
        "lane": min(geometry.head_dim_qk, geometry.head_dim_v),
    }


def as_input(field: TensorField, value: Any) -> torch.Tensor:
    """A tensor for a field; host values get the declared dtype if only their width differs."""
    expected = getattr(torch, field.dtype.name)
    if isinstance(value, (list, tuple, int, float)):
        value = torch.as_tensor(value, dtype=expected)
    tensor = as_torch(value, field.name).detach()
    if tensor.device.type != "cpu" or tensor.dtype == expected:
        return tensor
    floats = tensor.is_floating_point() and expected.is_floating_point
    integers = tensor.dtype in (torch.int64, torch.int16) and expected == torch.int32
    if floats or (integers and bool((tensor.abs() < 2**31).all())):
        return tensor.to(expected)
    return tensor


def _roles_text(field: TensorField, sizes: Mapping[str, int]) -> str:
    def one(role: str | None) -> str:
        if role is None or role not in sizes:
            return role or "any"
        return f"{role}{'=' if role in _EXACT else '>='}{sizes[role]}"

    return f"[{', '.join(one(role) for role in field.roles)}]"


def _write_tensor(block: ParamBlock, name: str, tensor: torch.Tensor) -> None:
    block.set(f"x_{name}", tensor.data_ptr())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        block.set(f"x_{name}_n{axis}", size)
        block.set(f"x_{name}_s{axis}", stride)
