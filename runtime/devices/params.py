"""The bytes of a kernel's argument, kept so that a launch rewrites only what changed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from warploom.codegen.abi import (
    MAX_SCORES_STRIDES,
    TENSOR_MAP_BYTES,
    TENSOR_MAPS,
    Packer,
    param_fields,
)
from warploom.dsl.types.spec import AttentionSpec

TENSORS = ("q", "k", "v", "o", "lse")
STRIDES = tuple(
    f"{tensor}_{axis}_stride"
    for tensor in TENSORS
    for axis in (("block", "token", "head") if tensor in "kv" else ("batch", "row", "head"))
)


class Members(Protocol):
    """What takes values of members by name."""

    def set(self, name: str, value: int | float) -> None: ...


def write_array(
    block: Members, name: str, address: int, shape: Sequence[int], strides: Sequence[int]
) -> None:
    """Write where an input lies, with its sizes and its strides in elements."""
    block.set(f"x_{name}", address)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        block.set(f"x_{name}_n{axis}", size)
        block.set(f"x_{name}_s{axis}", stride)


class Block:
    """A kernel's argument, at an address that never changes.

    Attributes:
        address: where the bytes lie.
        arguments: address of the array of one pointer to them, as cuLaunchKernel takes it.
    """

    def __init__(self, packer: Packer, size: int) -> None:
        self._bytes = bytearray(size)
        self._view = (ctypes.c_char * size).from_buffer(self._bytes)
        self.address = ctypes.addressof(self._view)
        self._arguments = ctypes.c_void_p(self.address)
        self.arguments = ctypes.addressof(self._arguments)
        self._offsets = offsets = packer.offsets
        self._at = {
            name: (struct.Struct("=" + code), offsets[name])
            for name, code in zip(packer.names, packer.codes, strict=True)
        }

    def writer(self, code: str, names: tuple[str, ...]) -> Callable[..., None]:
        """A function that writes members which lie side by side, given in order."""
        form, offset = _run(code, names, self._offsets)
        return partial(form.pack_into, self._bytes, offset)

    def set(self, name: str, value: int | float) -> None:
        """Write one member."""
        form, offset = self._at[name]
        form.pack_into(self._bytes, offset, value)

    def get(self, name: str) -> int | float:
        """Read one member back, for tests and `explain()`."""
        form, offset = self._at[name]
        value: int | float = form.unpack_from(self._bytes, offset)[0]
        return value


class ParamBlock(Block):
    """`Params` of one wrapper.

    Attributes:
        set_pointers: writes the addresses of q, k, v, o and lse.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        packer = Packer(param_fields(spec))
        self._maps_at = packer.tensor_maps_offset
        # kernels without maps read a prefix
        super().__init__(packer, self._maps_at + len(TENSOR_MAPS) * TENSOR_MAP_BYTES)
        self.set_pointers = self.writer("Q", TENSORS)
        self._set_strides = self.writer("q", STRIDES)

    def set_tensor_maps(self, maps: bytes) -> None:
        """Write tensor maps, in the order of `TENSOR_MAPS`."""
        self._bytes[self._maps_at : self._maps_at + len(maps)] = maps

    def set_strides(self, strides: tuple[int, ...]) -> None:
        """Write all strides, in the order of `STRIDES`."""
        self._set_strides(*strides)

    def set_max_scores(self, address: int, strides: tuple[int, ...]) -> None:
        """Write where largest scores go, in kernels that tell them: (batch, row, head) strides."""
        for name, value in zip(
            ("max_scores", *MAX_SCORES_STRIDES), (address, *strides), strict=True
        ):
            self.set(name, value)


def _run(code: str, names: tuple[str, ...], offsets: dict[str, int]) -> tuple[struct.Struct, int]:
    """A struct over members that lie side by side, and where it begins."""
    first, size = offsets[names[0]], struct.calcsize("=" + code)
    if [offsets[name] for name in names] != [first + size * i for i in range(len(names))]:
        raise RuntimeError(f"{names} do not lie side by side in Params")
    return struct.Struct(f"={len(names)}{code}"), first
