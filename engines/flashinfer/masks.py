"""Masks of bits: packed as FlashInfer packs them, and given to `PackedMask`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from warploom.engine_errors import BeyondGraph
from warploom.engines.flashinfer.graphs import check_sizes
from warploom.errors import ArgumentError, WrongDType
from warploom.runtime.tensors.tensors import as_torch

_ORDERS = ("big", "little")


def packbits(x: Any, bitorder: str = "big") -> torch.Tensor:
    """Pack flags into bytes, as `numpy.packbits` does.

    Args:
        x: [n], of bools or numbers; True where not 0.
        bitorder: "big" puts the first flag into the highest bit of a byte, "little" into the
            lowest.

    Returns:
        uint8 [ceil(n / 8)], on x's device; bits behind the last flag are 0.

    Raises:
        ArgumentError: another order.
    """
    flags = as_torch(x, "x").reshape(-1)
    _check_order(bitorder)
    begin = torch.tensor([0, len(flags)], device=flags.device)
    return _packed(flags, begin, begin[1:] * 0, -(-len(flags) // 8), bitorder)


def segment_packbits(
    x: Any, indptr: Any, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack flags of several segments, each into bytes of its own.

    Args:
        x: [indptr[-1]], of bools or numbers; True where not 0.
        indptr: [segments + 1] integers, where each segment begins.
        bitorder: as of `packbits`; masks of attention are "little".

    Returns:
        uint8 [new_indptr[-1]] on x's device, and new_indptr, int32 [segments + 1] on indptr's.
        Segment i has ceil((indptr[i + 1] - indptr[i]) / 8) bytes. Their number is read, so that
        indptr on a device is waited for.

    Raises:
        ArgumentError: another order, or x has not as many flags as indptr says.
    """
    _check_order(bitorder)
    flags, begin = as_torch(x, "x").reshape(-1), as_torch(indptr, "indptr").long()
    first = torch.nn.functional.pad(((begin.diff() + 7) // 8).cumsum(0), (1, 0))
    flags_said, size = torch.stack((begin[-1], first[-1])).tolist()
    if len(flags) != flags_said:
        reason = f"has {len(flags)} flags; indptr ends with {flags_said}"
        raise ArgumentError(name="x", reason=reason)
    there = flags.device
    packed = _packed(flags, begin.to(there), first[:-1].to(there), size, bitorder)
    return packed, first.int()


def _check_order(bitorder: str) -> None:
    if bitorder not in _ORDERS:
        reason = f"is {bitorder!r}; expected 'big' or 'little'"
        raise ArgumentError(name="bitorder", reason=reason)


def _packed(
    flags: torch.Tensor, begin: torch.Tensor, first: torch.Tensor, size: int, bitorder: str
) -> torch.Tensor:
    """`begin` of each segment in flags and the `first` byte of each, on the device of flags."""
    place = torch.arange(len(flags), device=flags.device)
    segment = torch.searchsorted(begin[1:], place, right=True)
    place += 8 * first[segment] - begin[segment]
    bits = torch.zeros(8 * size, dtype=torch.uint8, device=flags.device)
    bits[place] = (flags != 0).to(torch.uint8)
    shift = torch.arange(8, dtype=torch.uint8, device=flags.device)
    shift = shift if bitorder == "little" else shift.flip(0)
    return (bits.view(-1, 8) << shift).sum(1, dtype=torch.uint8)


@dataclass
class Masks:
    """The masks of a facade's batches; for graphs in memory of fixed addresses.

    Attributes:
        device: of attention.
        buffers: for graphs, the caller's `custom_mask_buf` and `mask_indptr_buf`, whose sizes are
            the room and which are not used themselves; looked at when a mask comes.
    """

    device: torch.device
    buffers: Mapping[str, Any] | None = None
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def inputs(self, custom: Any, packed: Any, q_lens: Any, kv_lens: Any) -> dict[str, Any]:
        """Values of `PackedMask`.

        Args:
            custom: flags of all requests one after the other, each [q_len, kv_len]; or None.
            packed: their bits in place of them, little-endian, each request in whole bytes.
            q_lens, kv_lens: [requests], of the host.

        Raises:
            ArgumentError: too many or too few flags, or no buffers for graphs.
            WrongDType: `packed` is no uint8.
            BeyondGraph: more bytes than the buffers for graphs have.
        """
        pairs = np.asarray(q_lens, np.int64) * np.asarray(kv_lens, np.int64)
        if packed is None:
            flags = as_torch(custom, "custom_mask").reshape(-1)
            if len(flags) != pairs.sum():
                reason = f"has {len(flags)} flags; the batch has {pairs.sum()} pairs of row and key"
                raise ArgumentError(name="custom_mask", reason=reason)
            begin = torch.as_tensor(np.concatenate(([0], np.cumsum(pairs))))
            bits, indptr = segment_packbits(flags, begin, "little")
        else:
            bits = as_torch(packed, "packed_custom_mask").reshape(-1)
            if bits.dtype != torch.uint8:
                got, expected = str(bits.dtype), "torch.uint8, as segment_packbits makes"
                raise WrongDType(name="packed_custom_mask", got=got, expected=expected)
            first = np.concatenate(([0], np.cumsum(-(-pairs // 8))))
            if len(bits) != first[-1]:
                reason = f"has {len(bits)} bytes; the batch has {first[-1]}, whole for each request"
                raise ArgumentError(name="packed_custom_mask", reason=reason)
            indptr = torch.as_tensor(first.astype(np.int32))
        if not len(bits):  # kernels need something to read
            bits = bits.new_zeros(1)
        return self._placed({"packed_mask": bits, "mask_indptr": indptr})

    def _placed(self, made: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self.buffers is None:
            on_host = self.device.type == "cpu"
            return {name: x if on_host else x.to(self.device) for name, x in made.items()}
        sizes = zip(self.buffers, check_sizes(**self.buffers), strict=True)
        for (name, x), (buffer, size) in zip(made.items(), sizes, strict=True):
            if len(x) > size:
                what = "bytes of masks" if name == "packed_mask" else "begins of masks"
                by = f"the length of {buffer}"
                raise BeyondGraph(name=what, got=len(x), bound=size, by=by)
            if name not in self._kept:
                self._kept[name] = torch.zeros(size, dtype=x.dtype, device=self.device)
            self._kept[name][: len(x)] = x.to(self.device)
        return dict(self._kept)
