"""Tensor maps: what the copy engine of Hopper must know of a tensor of keys or values."""

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

Encode = Callable[[int], bytes]  # from an address to the bytes of a map

# What L2 fetches at once, of keys that several tiles read, and of decodes beside prefills, which
# read theirs once. A row of 128 lanes comes in two boxes. With 256 bytes for either, prefills are 2
# to 4 % faster on an H200, and decodes read 4.2 TB/s; with 128 as much as by addresses, 4.5.
_FETCHED, _FETCHED_ONCE = "L2_256B", "L2_128B"
_TYPES = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_KEPT = 512  # pairs of tensors, such as the layers of a model


class TensorMaps:
    """Maps of the tensors one wrapper reads."""

    def __init__(self, geometry: Geometry, tile: TileConfig, box: Box) -> None:
        self._driver = load_driver()
        self._format = geometry.format
        self._box = box
        self._box_lanes = box.row_bytes // geometry.kv_dtype.itemsize
        self._fetched = (_FETCHED,) if tile.decode is None else (_FETCHED, _FETCHED_ONCE)
        self._type = _TYPES.get(geometry.kv_dtype, "UINT8")  # what 8 bits stand for, kernels know
        self._layout: tuple[object, ...] = ()
        self._maps: MapsOfLayout | None = None

    @classmethod
    def of(cls, geometry: Geometry, tile: TileConfig) -> TensorMaps | None:
        """Maps for a kernel of this tile, or None if it copies without them."""
        dims = geometry.head_dim_qk, geometry.head_dim_v
        box = template_of(tile).box(geometry.kv_format, tile, dims)
        return None if box is None else cls(geometry, tile, box)

    def of_layout(self, k: torch.Tensor, v: torch.Tensor) -> MapsOfLayout:
        """Maps of tensors with the shapes and strides of these.

        Raises:
            WrongStride: the copy engine cannot step through a tensor.
        """
        # Type and device are those of the wrapper: whoever asks has checked that.
        layout = (k.shape, k.stride(), v.shape, v.stride())
        if self._maps is None or layout != self._layout:
            both = ((k, "k"), (v, "v"))
            maps = MapsOfLayout([self._encoder(*x, size) for size in self._fetched for x in both])
            maps(k.data_ptr(), v.data_ptr())
            self._maps, self._layout = maps, layout
        return self._maps

    def _encoder(self, tensor: torch.Tensor, name: str, fetched: str) -> Encode:
        """Encodes maps of tensors like this one, of which so much is fetched at once."""
        if tensor.numel() == 0:
            # there is nothing to copy, and no map of nothing
            return lambda address: bytes(TENSOR_MAP_BYTES)
        view = self._format.by_block_token_head(tensor)
        blocks, tokens, heads, lanes = view.shape
        # The stride of an axis of one place means nothing, and torch may say anything there.
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
    """Maps of keys and values with one pair of shapes and strides, made once for each address."""

    def __init__(self, encoders: Sequence[Encode]) -> None:
        """Those of keys and of values in turn."""
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
    """Of token, head and block."""
    return view.stride(1), view.stride(2), view.stride(0)
