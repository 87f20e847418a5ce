"""The kernel for tiles of one row, its text run by fibers on the host, agrees with the oracle."""

from __future__ import annotations

import pytest
from support.emulator import Emulator

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch


class Hooks(wl.Variant):
    """Hooks that read all of a row, and one that scales values."""

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * wl.rsqrt(wl.sum(q * q) / at.head_dim + 1e-6) * (1.0 + 0.01 * at.lane)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * (1.0 + 0.01 * at.kv_pos)

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.rsqrt(wl.sum(o * o) / at.head_dim + 1e-6) + 0.1 * at.lse


EIGHT, SIXTEEN = TileConfig(1, 64, 2, 1), TileConfig(1, 32, 2, 1)  # 32 and 16 keys of a warp
CASES = {
    "paged": (wl.Causal(), Setup(wl.Paged(16), "bfloat16", 128, 128, tile=SIXTEEN)),
    "page of 1": (wl.Causal() & wl.SoftCap(3.0), Setup(wl.Paged(1), "float16", tile=EIGHT)),
    "HND": (Hooks(), Setup(wl.Paged(5, layout="HND"), "bfloat16", 128, 64, tile=SIXTEEN)),
    "window": (wl.SlidingWindow(40), Setup(wl.Ragged(), "float16", 40, 72, tile=SIXTEEN)),
    "sink": (wl.Causal() & wl.AttentionSink(), Setup(wl.Ragged(), "bfloat16", 8, 8, tile=EIGHT)),
    "wide": (wl.Alibi(), Setup(wl.Paged(3), "bfloat16", 256, 192, tile=SIXTEEN)),
    "blocks": (wl.Causal(), Setup(wl.BlockSparse(block=(1, 5)), "float16", 32, 48, tile=EIGHT)),
    "sigmoid": (wl.FlashSigmoid(bias=-2.0), Setup(wl.Paged(16), "float16", tile=EIGHT)),
    "documents": (wl.DocumentMask(), Setup(wl.Ragged(), "bfloat16", tile=EIGHT)),
    "narrow": (
        wl.Causal() & wl.TokenKVScale(),
        Setup(wl.Paged(16), "bfloat16", 128, 128, tile=EIGHT, kv_dtype="float8_e4m3fn"),
    ),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", CASES)
def test_one_row_agrees_with_the_oracle(emulator: Emulator, name: str) -> None:
    variant, setup = CASES[name]
    for emulator.order, q_lens, kv_lens, heads in (
        (0, (1, 1, 1, 1), (130, 1, 257, 0), (2, 1)),  # decoding
        (1, (1,), (700,), (1, 1)),  # all CTAs share one row, whose parts are merged
        (0, (3, 0, 2), (40, 5, 33), (2, 2)),  # more rows than the tile was chosen for
    ):
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"
