"""The check of a field's tensor that does not depend on the batch."""

from __future__ import annotations

import torch

from warploom.dsl.types.axes import axes_text
from warploom.dsl.types.spec import TensorField
from warploom.errors import WrongDevice, WrongDType, WrongShape
from warploom.runtime.inputs.outputs import type_remedy


def check_type(
    field: TensorField, tensor: torch.Tensor, device: torch.device, variant: str
) -> None:
    """Raise WrongDType, WrongDevice or WrongShape for a wrong type, device, or number of axes.

    Args:
        field: the declared field.
        tensor: its value.
        device: where the tensor must be.
        variant: name of the variant, for messages.
    """
    expected = getattr(torch, field.dtype.name)
    if tensor.dtype != expected:
        raise WrongDType(
            name=field.name,
            got=str(tensor.dtype),
            expected=str(expected),
            remedy=type_remedy(field, variant, tensor.dtype),
        )
    if tensor.device != device:
        raise WrongDevice(name=field.name, got=str(tensor.device), expected=str(device))
    if tensor.dim() != len(field.axes):
        axes = axes_text(field, {})
        raise WrongShape(name=field.name, got=tuple(tensor.shape), expected=axes)
