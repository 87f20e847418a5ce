"""Values of inputs between their check and their keeping: `plan` keeps all of them, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warploom.runtime.inputs.values import Number


@dataclass(frozen=True)
class OfferedTensor:
    """A tensor that was checked, and is not kept yet.

    Attributes:
        source: as it was given.
        tensor: in the declared type, where the source lies.
        placed: what the kernel will read: the tensor, or memory to copy it to.
        held: what the mask reads of it, copied, if the host has it.
    """

    source: Any
    tensor: torch.Tensor
    placed: torch.Tensor
    held: torch.Tensor | None

    @property
    def known(self) -> np.ndarray[Any, Any] | None:
        """The same for planners; NumPy has no bfloat16."""
        if self.held is None or self.held.dtype == torch.bfloat16:
            return None
        return self.held.numpy()


@dataclass(frozen=True)
class Offer:
    """Values that were checked, and are not kept yet, by name."""

    scalars: dict[str, Number]
    tensors: dict[str, OfferedTensor]


NOTHING = Offer({}, {})
