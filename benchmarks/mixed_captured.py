"""Batches through wrappers for CUDA graphs, whose kernel all steps share: two roles, or one tile.

Mixed ones, few decodes beside a chunk, and batches of one kind, which such a graph serves as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from batches import Inputs, Shape
from harness import Implementation, Thunk
from mixed_batches import Kind
from mixed_goals import ONE_PLAN, ONE_TILE
from peers import planned

import warploom as wl
from warploom.codegen.source import TileConfig

BOUNDS = wl.Bounds(max_requests=257, max_q_rows=4353, max_kv_len=32768, max_blocks=80_000)
TALL = TileConfig(128, 128, 8, 2, "hopper")
SMALLER = TileConfig(64, 64)  # of a CPU
SMALL = replace(SMALLER, decode=TileConfig(8, 64))
# rows and keys of the chunks; decodes and their keys
Parts = tuple[tuple[int, ...], int, int, int]
BATCHES: dict[str, Parts] = {
    "1k/8k + 32/8k": ((1024,), 8192, 32, 8192),
    "1k/8k + 16/8k": ((1024,), 8192, 16, 8192),
    "2k/8k + 64/8k": ((2048,), 8192, 64, 8192),
    "4 x 512/1k + 64/2k": ((512,) * 4, 1024, 64, 2048),
    "256/1k + 16/1k": ((256,), 1024, 16, 1024),
    "352/20k + 9/20k": ((352,), 19_580, 9, 19_580),
    "512/8k + 4/1k": ((512,), 8192, 4, 1024),
    "2 x 512/4k + 8/1k": ((512,) * 2, 4096, 8, 1024),
    "256/30k + 4/4k": ((256,), 30_720, 4, 4096),
    "512/8k": ((512,), 8192, 0, 0),
    "1k/16k": ((1024,), 16_384, 0, 0),
    "2k": ((2048,), 2048, 0, 0),
    "8 x 256": ((256,) * 8, 256, 0, 0),
    "16 x 100": ((100,) * 16, 100, 0, 0),
    "32 x 5/4k": ((5,) * 32, 4096, 0, 0),
    "128/4k": ((), 0, 128, 4096),
    "16/1k": ((), 0, 16, 1024),
}
HEADS = ((32, 8), (32, 32))


def shapes(small: bool) -> dict[str, Shape]:
    """By name; heads of 128, pages of 16, bf16, or of a 64th of the sizes."""
    scale, dim = (64, 64) if small else (1, 128)
    found = {}
    for q_heads, kv_heads in HEADS[:1] if small else HEADS:
        for name, (rows, keys, decodes, length) in BATCHES.items():
            q_lens = (*(-(-n // scale) for n in rows), *(1,) * decodes)
            kv_lens = (-(-keys // scale),) * len(rows) + (-(-length // scale),) * decodes
            shape = Shape(q_lens, kv_lens, q_heads, kv_heads, dim, torch.bfloat16, 16)
            found[f"{name}, {q_heads}/{kv_heads}"] = shape
    return found


def run(kind: Kind, tile: TileConfig | None, inputs: Sequence[Inputs]) -> list[Thunk]:
    on_gpu = inputs[0].q.device.type == "cuda"
    options: dict[str, Any] = {"bounds": BOUNDS, "cuda_graph": on_gpu, "tile": tile}
    attention = planned(kind.variant(), inputs[0], **options)
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def ways(kind: Kind, on_gpu: bool) -> dict[str, list[Implementation]]:
    """What a wrapper gets by itself, which is two roles, and one tile for all."""
    tiles = {ONE_PLAN: None, ONE_TILE: TALL} if on_gpu else {ONE_PLAN: SMALL, ONE_TILE: SMALLER}
    return {row: [Implementation(row, partial(run, kind, tile))] for row, tile in tiles.items()}
