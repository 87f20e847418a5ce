"""What kernels get of a virtual cache: tensors at its addresses, and page tables of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from warploom.dsl.types.formats import Layout
from warploom.errors import ArgumentError
from warploom.serving.virtual_memory.geometry import Geometry

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


class Views:
    """Tensors of all layers and requests, which share one storage: all addresses of a cache."""

    def __init__(
        self, memory: torch.Tensor, geometry: Geometry, slots: int, layout: Layout
    ) -> None:
        """Of `memory`, all addresses as numbers of the cache's type."""
        self._memory, self._geometry = memory, geometry
        self._slots, self._layout = slots, layout
        self._kv: dict[int, Pair] = {}

    def kv(self, layer: int) -> Pair:
        """[pages, tokens in a page, heads, dim], or HND; the same tensors each time."""
        if layer not in self._kv:
            geometry = self._geometry
            pages = (self._slots - 1) * geometry.blocks_per_slot
            pages += geometry.capacity // geometry.block
            shape = pages, geometry.block
            self._kv[layer] = self._pair(layer, 0, shape, (geometry.block_bytes,))
        return self._kv[layer]

    def of_slot(self, slot: int, tokens: int, layer: int) -> Pair:
        """[tokens, heads, dim], or HND."""
        return self._pair(layer, slot * self._geometry.slot_bytes, (tokens,), ())

    def _pair(
        self, layer: int, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Pair:
        """[..., token, head, dim], of which the first byte in layer 0 and `...` are given."""
        geometry, item = self._geometry, self._geometry.item_bytes
        layers = geometry.sizes["layer"]
        if not (isinstance(layer, int) and 0 <= layer < layers):
            reason = f"is {layer!r}; the model has layers 0 to {layers - 1}"
            raise ArgumentError(name="layer", reason=reason)
        strides += (geometry.stride("token"), geometry.stride("head"), item)
        shape += (geometry.sizes["head"], geometry.head_dim)
        steps = [stride // item for stride in strides]
        first += layer * geometry.stride("layer")
        k, v = (
            self._memory.as_strided(shape, steps, (first + i * geometry.stride("kv")) // item)
            for i in range(2)
        )
        if self._layout == "HND":
            return k.transpose(-3, -2), v.transpose(-3, -2)
        return k, v


def page_tables(geometry: Geometry, slots: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """`kv_indptr`, `kv_indices` and `last_page_len` of requests in these slots, int32."""
    tokens, block = np.array(lengths, np.int32), geometry.block
    counts = -(-tokens // block)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    first = np.array(slots, np.int32) * geometry.blocks_per_slot
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    last = np.where(counts > 0, tokens - (counts - 1) * block, 0)
    return {
        "kv_indptr": indptr,
        "kv_indices": (np.repeat(first, counts) + place).astype(np.int32),
        "last_page_len": last.astype(np.int32),
    }
