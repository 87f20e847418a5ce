"""Input values that were checked but not stored yet: `plan` stores all of them, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warploom.runtime.inputs.values import Number


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that was checked, and is not stored yet.

    Attributes:
        source: the value as it was given.
        tensor: the value in the declared type, on the source's device.
        placed: the memory that the kernel will read: `tensor`, or memory to copy it to.
        held: a host copy of the part that the mask reads; None if it is on the device only.
    """

    source: Any
    tensor: torch.Tensor
    placed: torch.Tensor
    held: torch.Tensor | None

    @property
    def known(self) -> np.ndarray[Any, Any] | None:
        """`held` as an array for planners; None also for bfloat16, which NumPy does not have."""
        if self.held is None or self.held.dtype == torch.bfloat16:
            return None
        return self.held.numpy()


@dataclass(frozen=True)
class Offer:
    """Values that were checked, and are not stored yet, by name."""

    scalars: dict[str, Number]
    tensors: dict[str, OfferedTensor]


NOTHING = Offer({}, {})
