"""What CUDA kernels record, their text run by fibers on the host, is what the oracle records."""

from __future__ import annotations

import pytest
import torch
from support.emulator import Emulator
from support.recorded_variants import ROWS, VARIANTS, Dump

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import sharing

TILES = {
    "one row": TileConfig(1, 64, 2, 1),
    "16 rows": TileConfig(16, 32, 2, 2),
    "8 rows": TileConfig(8, 32, 2, 2),
    "64 rows": TileConfig(64, 32, 2, 2),
    "two row blocks": TileConfig(128, 32, 4, 2),
    "hopper": TileConfig(64, 64, 4, 2, "hopper", 2),
    "two groups": TileConfig(128, 64, 8, 2, "hopper", 1),
}
DECODING = (1,) * 5, (70, 1, 257, 0, 66)
MIXED = (3, 0, 2, 70), (40, 5, 33, 30)  # queries before the first key, too
SPLIT = (1,), (700,)  # all CTAs share one row
EQUAL = (9, 9, 9), (50, 40, 0)


def setup(kv_format: wl.Ragged | wl.Paged | wl.Dense | wl.BlockSparse, tile: str) -> Setup:
    return Setup(kv_format, "float16", 64, 64, tile=TILES[tile])


def check(
    emulator: Emulator,
    variant: wl.Variant,
    setup: Setup,
    batches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (DECODING, MIXED, SPLIT),
) -> None:
    group = 1 if setup.tile == TILES["one row"] else 3
    for emulator.order, (q_lens, kv_lens) in enumerate(batches):
        case = Case(setup, q_lens, kv_lens, 2, group, scale=2.0, seed=3 + emulator.order)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("tile", "name"),
    [("one row", "behind a cap"), ("16 rows", "open part"), ("8 rows", "documents"),
     ("64 rows", "behind a bias"), ("two row blocks", "documents"), ("hopper", "two parts"),
     ("two groups", "before a bias"),
     ("hopper", "no softmax"), ("one row", "no softmax"), ("two groups", "open part")],
)  # fmt: skip
def test_each_kernel(emulator: Emulator, tile: str, name: str) -> None:
    check(emulator, VARIANTS[name], setup(wl.Paged(16), tile))


@pytest.mark.parametrize("tile", ["16 rows", "hopper"])
def test_tiles_of_many_requests(
    emulator: Emulator, tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PER_ITEM", 0)  # whatever may be a part is one
    monkeypatch.setattr(sharing, "PER_ROW", 0)
    check(emulator, VARIANTS["before a cap"], setup(wl.Composed(4), tile))


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", ["one row", "64 rows", "hopper"])
def test_listed_columns(emulator: Emulator, tile: str) -> None:
    check(emulator, ROWS, setup(wl.BlockSparse(block=(16, 4)), tile), (MIXED, SPLIT))


@pytest.mark.parametrize("tile", ["64 rows", "hopper"])
def test_keys_that_no_mask_hides_and_that_do_not_exist(emulator: Emulator, tile: str) -> None:
    check(emulator, VARIANTS["alone"], setup(wl.Dense(layout="HND"), tile), (EQUAL,))


@pytest.mark.some(2)
@pytest.mark.parametrize("tile", TILES)
def test_scales_below_0_and_nothing_beside_an_output(emulator: Emulator, tile: str) -> None:
    """Kernels multiply with such a scale at once. The output is a view with room around it."""
    torch.manual_seed(0)
    q = torch.randn(9, 2, 64).half()
    k, v = torch.randn(2, 40, 1, 64).half()
    variant = Dump()
    wrapper = wl.AttentionWrapper(
        variant, kv_format=wl.Ragged(), num_q_heads=2, num_kv_heads=1, head_dim=64,
        dtype="float16", device="cpu", tile=TILES[tile], sm_scale=-0.2,
    )  # fmt: skip
    room = torch.full((3, 4, 11, 100), torch.nan)
    seen, expected = room[1:2, 1:3, 1:10, 20:100:2], torch.empty(1, 2, 9, 40)
    wrapper.plan([0, 9], [0, 40])
    wrapper.run(q, (k, v), seen=seen)
    wl.reference_attention(variant, q, k, v, sm_scale=-0.2, inputs={"seen": expected})
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)
    assert int((~room.isnan()).sum()) == seen.numel()
