"""CPU kernels with AMX's tile registers, emulated: most processors have none."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.emulator import EMULATION

from warploom.codegen.compilers.hostcc import HostTarget, probe
from warploom.codegen.source import TileConfig
from warploom.dsl.library.causal import Causal


@pytest.fixture(scope="module")
def with_tiles() -> HostTarget:
    """This machine's GCC, which believes that there are tile registers."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs x86 and GCC")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs AVX2")
    command = ("g++", "-include", str(EMULATION / "tile_registers.hpp"))
    target = probe(command, "-march=x86-64-v3", ("-O0", "-Wno-psabi"))
    if target is None:
        pytest.skip("GCC does not know x86-64-v3")
    assert "__AMX_BF16__" in target.features
    return target


@pytest.mark.parametrize("rows", [12, 24])  # of tiles for decodes, and for prefills
def test_a_row_has_the_same_bits_in_any_chunk(
    cpu_run: Callable[..., Any], with_tiles: HostTarget, rows: int
) -> None:
    """Tiles and vectors add in different orders, so a short chunk must not change from one to
    the other.
    """
    run = cpu_run(
        Causal(), (12, 3, 1), (70, 70, 70), target=with_tiles, tile=TileConfig(rows, 64, 1, 1)
    )
    run.q[12:15] = run.q[9:12]
    run.q[15] = run.q[11]
    for stored in run.stored:  # all three requests have the same keys
        stored[70:140] = stored[140:] = stored[:70]
    found = run.launch()
    run.check(found)
    for kind in (found.o, found.lse):
        np.testing.assert_array_equal(kind[1], kind[0][9:])
        np.testing.assert_array_equal(kind[2], kind[0][11:])
