"""Conversion of values to what a variant's fields declare: numbers, and tensors of a type."""

from __future__ import annotations

import math
import struct
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.dsl.types.axes import axes_text
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import ScalarField, TensorField
from warploom.dsl.variants.capture import writes
from warploom.errors import ArgumentError, WarploomError, WrongDType, WrongShape
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.tensors.plain import refuse_freed, refuse_stand_in
from warploom.runtime.tensors.tensors import as_seen, as_torch, byte_span

Number = bool | int | float

# Device tensors whose values fit 32 bits -> number of writes to them when they were checked.
_seen_on_device: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
_INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_NUMBERS: dict[Kind, tuple[str, Any]] = {
    Kind.FLOAT: ("a Python float or int", (int, float)),
    Kind.INT: ("a Python int", (int,)),
    Kind.BOOL: ("True or False", (bool,)),
}


def checked_scalar(field: ScalarField, value: Any) -> Number:
    """The value as a number of the field's kind, accepted by the field's check.

    Raises:
        WrongDType: the value is no number, or no integer where the field declares one.
        WrongShape: the value is a tensor of several numbers, or of none.
        ArgumentError: an integer does not fit into the field's type or into 32 bits, a number does
            not fit into float32, or the field's check refuses it.
    """
    kind = field.dtype.kind
    wanted, types = _NUMBERS[kind]
    if not isinstance(value, types) and isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        if math.prod(value.shape) != 1:
            raise WrongShape.of_scalar(field.name, tuple(value.shape), field.dtype.name)
        if isinstance(value, torch.Tensor):
            refuse_stand_in(value, field.name)
        value = value.item()
    if not isinstance(value, types):
        raise WrongDType(
            name=field.name,
            got=type(value).__name__,
            expected=f"one number of {field.dtype.name}",
            remedy=f"Give {wanted}, or declare the field with another dtype.",
        )
    least, greatest = field.dtype.limits
    if kind is Kind.INT and not least <= value <= greatest:
        held = "int32" if field.dtype.bytes > 4 else field.dtype.name  # as in kernels
        raise ArgumentError(name=field.name, reason=f"{value} does not fit into {held}")
    if kind is Kind.FLOAT:
        if not fits_float32(value):
            raise ArgumentError(name=field.name, reason=f"{value} does not fit into float32")
        value = float(value)
    if field.check is not None:
        field.refuse(value)
    return value  # type: ignore[no-any-return]


def fits_float32(value: float) -> bool:
    """True if the kernel's parameter can hold it; infinities and NaN pass."""
    try:
        struct.pack("<f", value)
    except (OverflowError, struct.error):  # the latter for ints that no double holds
        return False
    return True


def with_an_element(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros if it is empty: loads clamp indices to elements that must exist."""
    if tensor.numel():
        return tensor
    return tensor.new_zeros([max(size, 1) for size in tensor.shape])


def extended(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor with its last entries repeated up to a shape; zeros if it is empty."""
    if not tensor.numel():
        return tensor.new_zeros(shape)
    for axis, size in enumerate(shape):
        if size > tensor.shape[axis]:
            index = torch.arange(size, device=tensor.device).clamp(max=tensor.shape[axis] - 1)
            tensor = tensor.index_select(axis, index)
    return tensor


def refuse_none(field: TensorField, value: Any) -> None:
    """Raise ArgumentError for None in place of a tensor; only a default None means "not given"."""
    if value is None:
        kind = f"{field.dtype.name} tensor {axes_text(field, {})}"
        raise ArgumentError(name=field.name, reason=f"is None; the variant reads it: give a {kind}")


def _from_numbers(field: TensorField, value: Any, expected: torch.dtype) -> torch.Tensor:
    """Python numbers as a tensor, of the declared type if that is a float type, else of their own.

    Raises:
        ArgumentError: they are no numbers, or in rows of different lengths, or too large for torch.
    """
    try:
        own = torch.as_tensor(value, device="cpu")
        floats = expected.is_floating_point and own.dtype != torch.bool
        return (
            torch.as_tensor(value, dtype=expected, device="cpu")
            if floats or not own.numel()
            else own
        )
    except WarploomError:  # reading the value called warploom, which raised this
        raise
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(name=field.name, reason=f"is no tensor ({error})") from error


def as_input(field: TensorField, value: Any) -> torch.Tensor:
    """A tensor for a field; host values get the declared dtype if only their width differs.

    Raises:
        ArgumentError: the value is None, or a list that is no tensor, or contains an integer that
            does not fit into the dtype or into int32, since kernels compute with 32 bits.
    """
    refuse_none(field, value)
    expected = getattr(torch, field.dtype.name)
    if isinstance(value, (list, tuple, int, float)):
        value = _from_numbers(field, value, expected)
    tensor = as_torch(value, field.name).detach()
    refuse_freed(tensor, field.name, byte_span(tensor))
    if tensor.device.type != "cpu":
        refuse_large_on_device(field, value, tensor)
        return tensor
    if tensor.dtype in _INTS and expected in _INTS:
        _refuse_large(field, tensor, torch.int32 if expected == torch.int64 else expected)
        return tensor.to(expected)
    floats = tensor.is_floating_point() and expected.is_floating_point
    return tensor.to(expected) if floats else tensor


def lies_in(value: Any, tensor: torch.Tensor) -> bool:
    """True if the tensor that `as_input` made of a value shares the value's memory."""
    if isinstance(value, (list, tuple, int, float)):
        return False
    return as_torch(value, "").data_ptr() == tensor.data_ptr()


def as_seen_input(field: ScalarField | TensorField, value: Any) -> Number | torch.Tensor:
    """A field's value as an operator takes it: a number, or a tensor, which may be a stand-in."""
    if isinstance(field, ScalarField):
        return checked_scalar(field, value)
    refuse_none(field, value)
    return as_seen(value, field.name)


def refuse_large_on_device(field: TensorField, given: Any, tensor: torch.Tensor) -> None:
    """Check the values of an int64 device tensor once, and again when torch has written to it.

    While a CUDA graph is captured, or under a compiler, values cannot be checked.

    Raises:
        ArgumentError: a value does not fit into 32 bits.
    """
    if tensor.dtype != torch.int64 or tensor.device.type == "meta":
        return
    if torch.compiler.is_compiling() or is_capturing(tensor.device):
        return
    count = writes(tensor)
    if isinstance(given, torch.Tensor) and count is not None:
        if _seen_on_device.get(given) == count:
            return
        _refuse_large(field, tensor, torch.int32)
        _seen_on_device[given] = count
    else:
        _refuse_large(field, tensor, torch.int32)


def _refuse_large(field: TensorField, tensor: torch.Tensor, widest: torch.dtype) -> None:
    if tensor.dtype == widest:
        return
    outside = (tensor.to(widest) != tensor).nonzero()
    if len(outside):
        at = outside[0].tolist()
        kind = str(widest).removeprefix("torch.")
        reason = f"its value {int(tensor[tuple(at)])} at {at} does not fit into {kind}"
        raise ArgumentError(name=field.name, reason=f"{reason}; renumber the values")
