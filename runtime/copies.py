"""Copies of host tensors on a device, made once and renewed when their source is written."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.dsl.dtypes import DType

# the version of the source that was copied, and the copy
_Copies: TypeAlias = dict[tuple[torch.device, DType], tuple[int, torch.Tensor]]


class DeviceCopies:
    """Copies by the identity of their source; they live as long as it.

    A source that changed is copied into the same memory, so that a captured CUDA graph reads its
    values of the last call.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[torch.Tensor, _Copies] = WeakTensorKeyDictionary()

    def __call__(
        self,
        source: torch.Tensor,
        device: torch.device,
        dtype: DType,
        host: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The copy of `source` on a device.

        Args:
            source: the host tensor, as its owner holds it.
            device: where the copy belongs.
            dtype: what the kernel reads.
            host: gives what to copy: `source` in that type.
        """
        if source.is_inference():  # torch does not count the writes to these
            return host().to(device)
        version, shape = source._version, source.shape
        copies = self._copies.setdefault(source, {})
        seen, copy = copies.get((device, dtype), (None, None))
        if copy is None or copy.shape != shape:
            copy = host().to(device)
        elif seen != version:
            copy.copy_(host())
        copies[device, dtype] = version, copy
        return copy
