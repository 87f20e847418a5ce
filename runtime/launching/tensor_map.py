"""Tensor maps: descriptors of keys or values for Hopper's copy engine (TMA)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from warploom.codegen.abi import TENSOR_MAP_BYTES
from warploom.codegen.attention.templates import template_of
from warploom.codegen.attention.tensor_boxes import Box
from warploom.codegen.source import TileConfig
from warploom.errors import WrongStride
from warploom.runtime.devices.cuda import load_driver
from warploom.runtime.inputs.args import Geometry

Encode = Callable[[int], bytes]  # address of a tensor -> the bytes of its map

# L2 promotion: for keys that several query tiles read, and for keys of decodes beside prefills,
# which are read once. A row of 128 lanes comes in two boxes. With 256 bytes on an H200, prefills
# are 2 to 4 % faster and decodes read 4.2 TB/s. With 128 bytes decodes read 4.5 TB/s, as much as
# with copies by address.
_FETCHED, _FETCHED_ONCE = "L2_256B", "L2_128B"
_TYPES = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_KEPT = 512  # cached pairs of k and v, such as those of a model's layers


class TensorMaps:
    """Maps of the tensors that one wrapper reads."""

    def __init__(self, geometry: Geometry, tile: TileConfig, box: Box) -> None:
        self._driver = load_driver()
        self._format = geometry.format
        self._box = box
        self._box_lanes = box.row_bytes // geometry.kv_dtype.itemsize
        self._fetched = (_FETCHED,) if tile.decode is None else (_FETCHED, _FETCHED_ONCE)
        self._type = _TYPES.get(geometry.kv_dtype, "UINT8")  # kernels know the 8-bit type
        self._layout: tuple[object, ...] = ()
        self._maps: MapsOfLayout | None = None

    @classmethod
    def of(cls, geometry: Geometry, tile: TileConfig) -> TensorMaps | None:
        """Maps for a kernel of this tile, or None if the kernel copies without maps."""
        dims = geometry.head_dim_qk, geometry.head_dim_v
        box = template_of(tile).box(geometry.kv_format, tile, dims)
        return None if box is None else cls(geometry, tile, box)

    def of_layout(self, k: torch.Tensor, v: torch.Tensor) -> MapsOfLayout:
        """Maps of tensors with the shapes and strides of these.

        Raises:
            WrongStride: the copy engine cannot step through a tensor.
        """
        # The caller has checked that type and device are the wrapper's.
        layout = (k.shape, k.stride(), v.shape, v.stride())
        if self._maps is None or layout != self._layout:
            both = ((k, "k"), (v, "v"))
            maps = MapsOfLayout([self._encoder(*x, size) for size in self._fetched for x in both])
            maps(k.data_ptr(), v.data_ptr())
            self._maps, self._layout = maps, layout
        return self._maps

    def _encoder(self, tensor: torch.Tensor, name: str, fetched: str) -> Encode:
        """A function that encodes maps of tensors like this one, with L2 promotion `fetched`."""
        if tensor.numel() == 0:
            # there is nothing to copy, and the driver encodes no map of an empty tensor
            return lambda address: bytes(TENSOR_MAP_BYTES)
        view = self._format.by_block_token_head(tensor)
        blocks, tokens, heads, lanes = view.shape
        # The stride of an axis of size 1 means nothing, and torch may report any number.
        strides = [
            (stride if size > 1 else lanes) * view.element_size()
            for size, stride in zip((tokens, heads, blocks), _strides(view), strict=True)
        ]
        if any(stride % 16 or stride <= 0 for stride in strides):
            raise WrongStride(
                name=name, got=tensor.stride(), expected="the strides must be multiples of 16 bytes"
            )
        driver = self._driver
        rest = (
            [driver.cuuint64_t(size) for size in (lanes, tokens, heads, blocks)],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in (self._box_lanes, self._box.tokens, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{self._box.row_bytes}B"),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{fetched}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{self._type}")
        got = tensor.stride()  # the encoder outlives the tensor, so it must not hold it

        def encode(address: int) -> bytes:
            status, made = driver.cuTensorMapEncodeTiled(kind, 4, address, *rest)
            if int(status) != 0:
                raise WrongStride(
                    name=name, got=got, expected="the copy engine refuses this tensor"
                )
            return ctypes.string_at(made.getPtr(), TENSOR_MAP_BYTES)

        return encode


class MapsOfLayout:
    """Maps of keys and values with one pair of shapes and strides, cached by their addresses."""

    def __init__(self, encoders: Sequence[Encode]) -> None:
        """Take the encoders, alternately of keys and of values."""
        self._encoders = encoders
        self._made: dict[tuple[int, int], bytes] = {}

    def __call__(self, k_at: int, v_at: int) -> bytes:
        """The bytes of all maps, for keys and values at these addresses."""
        found = self._made.get((k_at, v_at))
        if found is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            at = cycle((k_at, v_at))
            found = b"".join(encode(next(at)) for encode in self._encoders)
            self._made[k_at, v_at] = found
        return found


def _strides(view: torch.Tensor) -> tuple[int, int, int]:
    """Strides of token, head and block."""
    return view.stride(1), view.stride(2), view.stride(0)
