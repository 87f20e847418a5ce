"""Two roles in one launch over blocks and rings, and under masks, run by fibers on the host."""

from __future__ import annotations

import pytest
import torch
from support.emulator import Emulator
from support.short_lists import short_ones_count

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

TURNED = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(8, 96, 3, 2))
SMALL = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(16, 64, 2, 2))
TALL = TileConfig(128, 64, 8, 2, "hopper", 1, decode=TileConfig(16, 96, 3, 2))
SHORT = TileConfig(64, 64, 4, 2, decode=TileConfig(16, 64, 2, 2))
EIGHT = TileConfig(64, 64, 4, 2, decode=TileConfig(8, 64, 2, 2))
WIDE = TileConfig(128, 32, 8, 2, decode=TileConfig(16, 128, 4, 2))
RING = wl.Rolling(170, 4)  # room for chunks of 100 rows under this window
STREAMED = wl.Causal() & wl.SlidingWindow(60, sinks=4)
PACKED = wl.Causal() & wl.DocumentMask(torch.arange(1000, dtype=torch.int32)[None] // 50)
FORMATS: dict[str, tuple[Variant, KVFormat, str, TileConfig]] = {
    "small blocks": (wl.Causal(), wl.BlockSparse(block=(5, 3)), "bfloat16", SMALL),
    "blocks, 8 rows": (
        *(wl.Causal() & wl.SoftCap(5.0), wl.BlockSparse(block=(16, 32))),
        *("float16", TURNED),
    ),
    "blocks, portable": (wl.Causal(), wl.BlockSparse(block=(16, 32)), "bfloat16", SHORT),
    "wide blocks": (wl.Variant(), wl.BlockSparse(block=(32, 128)), "float16", EIGHT),
    "ring": (STREAMED, RING, "bfloat16", TURNED),
    "ring, portable": (STREAMED, RING, "float16", SHORT),
    "places in a ring": (
        *(wl.Causal(), wl.Rolling(64, 4, positions="cache", layout="HND")),
        *("bfloat16", TALL),
    ),
}
MASKS: dict[str, tuple[Variant, KVFormat, str, TileConfig]] = {
    "sink": (wl.Causal() & wl.AttentionSink(), wl.Paged(16), "bfloat16", TURNED),
    "sink, shared keys": (wl.Causal() & wl.AttentionSink(), wl.Composed(16), "float16", SHORT),
    "sinks of a window": (STREAMED, wl.Ragged(), "bfloat16", WIDE),
    "prefix": (wl.PrefixLM(), wl.Ragged(), "bfloat16", TURNED),
    "prefix, portable": (wl.PrefixLM(), wl.Paged(1), "float16", EIGHT),
    "documents": (PACKED, wl.Ragged(), "float16", TALL),
    "documents, portable": (PACKED, wl.Paged(3), "bfloat16", SHORT),
}
BATCHES = [  # lengths of queries and of keys
    ((70, 1, 0, 33, 1, 2), (130, 257, 40, 33, 500, 64)),
    ((1, 4, 1), (300, 40, 0)),  # decodes alone
    ((100, 60), (200, 60)),  # prefills alone
    ((1, 90, 1, 1), (64, 700, 32, 1000)),
]


def check(emulator: Emulator, job: tuple[Variant, KVFormat, str, TileConfig], order: int) -> None:
    """With prefills that are cut, and whole; of five CTAs, and of two."""
    variant, kv_format, element, tile = job
    setup = Setup(kv_format, element, tile=tile)
    for are_cut, sm_limit in ((True, None), (False, None), (True, 2)):
        for q_lens, kv_lens in BATCHES:
            order += 1
            emulator.order = order
            case = Case(setup, q_lens, kv_lens, 2, 4, seed=order, sm_limit=sm_limit)
            with short_ones_count(are_cut):
                found = mismatch(variant, case)
            assert found is None, f"order {order}, cut: {are_cut}: {case}: {found}"


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FORMATS)
def test_keys_lie_in_blocks_or_rings(emulator: Emulator, name: str) -> None:
    check(emulator, FORMATS[name], 20 * list(FORMATS).index(name))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", MASKS)
def test_keys_are_hidden_or_have_logits_beside_them(emulator: Emulator, name: str) -> None:
    check(emulator, MASKS[name], 20 * list(MASKS).index(name))
