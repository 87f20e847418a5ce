"""Kernels for tiles of 8, 16 and 64 rows, run by fibers on the host, agree with the oracle."""

from __future__ import annotations

import pytest
import torch
from support.composed_variants import EveryHook, NormOfRequest
from support.emulator import Emulator
from support.padding import with_and_without_garbage

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import sharing


class SomeKeys(wl.Variant):
    """A mask of which tiles below the diagonal leave the tensor's part open."""

    hidden = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def logits_mask(self, at: Position) -> Value:
        return ~self.hidden[at.kv_head, at.kv_pos] & (at.kv_pos <= at.q_pos)


PAIRED, ALONE, TALL = (
    TileConfig(16, 32, 2, 2), TileConfig(16, 64, 4, 2), TileConfig(64, 32, 2, 2)
)  # fmt: skip
EIGHT, EIGHT_ALONE, EIGHT_SHORT = (
    TileConfig(8, 64, 2, 2), TileConfig(8, 64, 4, 3), TileConfig(8, 16, 1, 2)
)  # fmt: skip
CASES = {
    "paged": (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 64, 64, tile=PAIRED)),
    "window": (wl.SlidingWindow(40), Setup(wl.Ragged(), "float16", 32, 64, tile=ALONE)),
    "tall": (wl.Causal(), Setup(wl.Paged(4), "float16", 32, 32, tile=TALL)),
    "open part": (SomeKeys(), Setup(wl.Paged(16), "bfloat16", 64, 64, tile=PAIRED)),
    "open part, tall": (SomeKeys(), Setup(wl.Ragged(), "bfloat16", 32, 32, tile=TALL)),
    "composed": (wl.Causal(), Setup(wl.Composed(16), "bfloat16", 64, 64, tile=PAIRED)),
    "four warps": (wl.Causal(), Setup(wl.Composed(4), "float16", 32, 32, tile=ALONE)),
    "12 warps": (
        wl.Causal(),
        Setup(wl.Paged(16), "bfloat16", 32, 32, tile=TileConfig(16, 192, 12, 2)),
    ),
    "16 warps": (
        wl.Causal(),
        Setup(wl.Ragged(), "bfloat16", 32, 32, tile=TileConfig(256, 32, 16, 2)),
    ),
    "one warp": (wl.Variant(), Setup(wl.Composed(4), "float16", 32, tile=TileConfig(16, 16, 1, 2))),
    "every hook": (EveryHook(), Setup(wl.Composed(4), "float16", 32, 32, tile=PAIRED)),
    "norm": (NormOfRequest(), Setup(wl.Composed(3), "bfloat16", 64, 64, tile=PAIRED)),
    "narrow": (
        wl.Causal() & wl.TokenKVScale(),
        Setup(wl.Composed(16), "bfloat16", 64, 64, tile=PAIRED, kv_dtype="float8_e4m3fn"),
    ),
    "8 rows": (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 64, 64, tile=EIGHT)),
    "8 rows, every hook": (EveryHook(), Setup(wl.Composed(4), "float16", 32, 64, tile=EIGHT_ALONE)),
    "8 rows, narrow": (
        wl.Causal() & wl.TokenKVScale(),
        Setup(wl.Paged(16), "bfloat16", 128, 64, tile=EIGHT, kv_dtype="float8_e4m3fn"),
    ),
    "8 rows, narrow halves": (
        wl.Causal() & wl.SoftCap(5.0),
        Setup(wl.Ragged(), "float16", 64, 128, tile=EIGHT_ALONE, kv_dtype="float8_e5m2"),
    ),
    "integers": (
        wl.Causal() & wl.TokenKVScale(),
        Setup(wl.Paged(16), "bfloat16", 64, 64, tile=PAIRED, kv_dtype="int8"),
    ),
    "8 rows, integers": (
        wl.Causal(),
        Setup(wl.Ragged(), "float16", 64, 64, tile=EIGHT, kv_dtype="int8"),
    ),
    "8 rows, one warp": (SomeKeys(), Setup(wl.Paged(4), "float16", 96, 32, tile=EIGHT_SHORT)),
    "composed, tall": (wl.Causal(), Setup(wl.Composed(4), "float16", 32, 32, tile=TALL)),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CASES)
def test_tiles_agree_with_the_oracle(
    emulator: Emulator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PER_ITEM", 0)  # whatever may be a part is one
    monkeypatch.setattr(sharing, "PER_ROW", 0)
    variant, setup = CASES[name]
    for emulator.order, q_lens, kv_lens, heads in (
        (0, (1,) * 7, (70, 64, 90, 0, 81, 33, 66), (2, 2)),  # decoding
        (1, (1, 1), (150, 160), (1, 1)),  # few items, whose keys are split
        (1, (3, 0, 2, 1), (40, 5, 33, 41), (1, 4)),
    ):
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("tile", "rows", "heads"),
    [(PAIRED, 3, 4), (EIGHT, 2, 4), (TALL, 40, 4), (TileConfig(1, 64, 2, 1), 1, 2)],
    ids=["16 rows", "8 rows", "64 rows", "one row"],
)
def test_what_no_row_sees_may_be_garbage(
    emulator: Emulator, tile: TileConfig, rows: int, heads: int
) -> None:
    with_garbage, without = with_and_without_garbage(rows, heads, tile=tile)
    assert torch.equal(with_garbage, without)
