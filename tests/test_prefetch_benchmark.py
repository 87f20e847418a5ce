"""The benchmark of prefetching runs, small and on the CPU, and its stand-in compiles."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.headers import find_toolchain
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.errors import NoCudaCompiler


def test_every_step_has_its_rows(harness: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import_module("prefetch").main(["--tiny", "--quick", "--out", str(tmp_path)])
    lines = (tmp_path / "prefetch.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    steps = {row["case"] for row in rows}
    assert steps == {f"{name}, {us} us" for name in ("tiny", "tiny keys") for us in (10, 40)}
    for step in steps:
        mine = {row["impl"]: row for row in rows if row["case"] == step}
        assert {"none", "none again", "chosen"} < set(mine)  # and budgets that fit
        assert mine["none"]["params"]["budget"] == 0
        assert mine["chosen"]["params"]["fitted_saved_us"] >= 0
        least = 1e-3 * mine["none"]["params"]["collective_us"]
        assert all(row["ms"] > least for row in mine.values())
    assert (tmp_path / "prefetch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_stand_in_compiles(harness: ModuleType, arch: str) -> None:
    try:
        find_toolchain()
    except NoCudaCompiler as error:
        pytest.skip(str(error))
    source = import_module("stand_in").StandInSpec().render("cuda")
    assert run_nvrtc(source.text, arch_named(arch), source.name).spill_bytes == 0
