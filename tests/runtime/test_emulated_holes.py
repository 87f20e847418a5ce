"""Keys between sinks and a window are left out in a few steps, however many they are.

Masks that read tensors are not asked so: where warps walk, their lanes ask for 32 tiles at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from support import emulator as emulators

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

TILES = {
    "hopper": TileConfig(64, 64, 4, 2, "hopper", 2),
    "16 rows": TileConfig(16, 64, 2, 2),
    "64 rows": TileConfig(64, 32, 2, 2),
    "one row": TileConfig(1, 64, 4, 2),
    "two roles": TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(16, 64, 2, 2)),
}
CLASSIFY = "WL_FN static TileClass classify("
COUNTER = """
extern "C" __attribute__((visibility("default"))) long long asked = 0;
"""


def counted(text: str) -> str:
    """The text of a kernel that counts how often its mask is asked for a tile."""
    before, found, behind = text.partition(CLASSIFY)
    assert found and CLASSIFY not in behind
    head, brace, body = behind.partition("{")
    at = text.index("#include")
    return text[:at] + COUNTER + before[at:] + found + head + brace + " ++::asked;" + body


@pytest.fixture
def asks(
    emulator: emulators.Emulator, monkeypatch: pytest.MonkeyPatch
) -> Callable[[TileConfig, int], int]:
    """Runs a batch with a hole, compares it with the oracle, and counts what its mask is asked."""
    libraries = []
    compiled = emulators.compile_for_fibers

    def counting(text: str, source: Path) -> ctypes.CDLL:
        libraries.append(compiled(counted(text), source))
        return libraries[-1]

    monkeypatch.setattr(emulators, "compile_for_fibers", counting)

    def ask(tile: TileConfig, keys: int) -> int:
        rows = (1, 70) if tile.of_roles else (min(70, tile.rows),)
        lens = (keys,) * len(rows)
        setup = Setup(wl.Paged(16), "bfloat16", 32, 32, tile=tile)
        variant = wl.Causal() & wl.SlidingWindow(100, sinks=4)
        assert mismatch(variant, Case(setup, rows, lens, 1, 1, seed=keys)) is None
        return sum(ctypes.c_longlong.in_dll(library, "asked").value for library in libraries)

    return ask


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_a_hole_twice_as_long_takes_a_step_more(
    asks: Callable[[TileConfig, int], int], tile: TileConfig
) -> None:
    short = asks(tile, 10_000)
    long = asks(tile, 20_000) - short
    assert 0 < short <= long < 1.5 * short
