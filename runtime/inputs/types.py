"""What a tensor must be to serve as a field of a variant, whatever the batch."""

from __future__ import annotations

import torch

from warploom.dsl.types.axes import axes_text
from warploom.dsl.types.spec import TensorField
from warploom.errors import WrongDevice, WrongDType, WrongShape
from warploom.runtime.inputs.outputs import type_remedy


def check_type(
    field: TensorField, tensor: torch.Tensor, device: torch.device, variant: str
) -> None:
    """Raise WrongDType, WrongDevice or WrongShape for another type, place, or number of axes.

    Args:
        field: as it was declared.
        tensor: its value.
        device: where that must lie.
        variant: name of whose field it is, for messages.
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
