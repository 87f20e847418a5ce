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
        assert {"none", "none again", "chosen", "chosen, own"} < set(mine)  # and budgets that fit
        assert mine["none"]["params"]["budget"] == 0
        for name in ("chosen", "chosen, own"):
            assert mine[name]["params"]["fitted_saved_us"] >= 0
        least = 1e-3 * mine["none"]["params"]["collective_us"]
        assert all(row["ms"] > least for row in mine.values())
    assert (tmp_path / "prefetch.png").read_bytes().startswith(b"\x89PNG")


def test_one_reader_has_more_ctas_and_other_collectives(
    harness: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its steps beside other stand-ins are not those that constants are fitted to."""
    pytest.importorskip("matplotlib")
    prefetch, fitter = import_module("prefetch"), import_module("fit_prefetch")
    monkeypatch.setenv("COLUMNS", "200")  # no case is wrapped
    parts = [tmp_path / name for name in ("one", "other")]
    for part, name in zip(parts, ("tiny keys", "tiny"), strict=True):
        given = ["--tiny", "--quick", "--captures", "1", "--readers", name, "--out", str(part)]
        prefetch.main(given)
    files = [part / "prefetch.jsonl" for part in parts]
    (_, keys), (_, both) = (harness.load_rows(file) for file in files)
    assert {row.case for row in keys} == {"tiny keys, 10 us", "tiny keys, 40 us"}
    tiny = [row for row in both if row.case == "tiny, 40 us"]
    assert {row.params["sms"] for row in tiny} == {8, 16, 32}
    assert {row.params["collective_sms"] for row in tiny} == {4, 16, 32}
    beside = [row for row in tiny if row.params["collective_sms"] != 16]
    assert {row.impl for row in beside} == {
        f"{what}, beside {held} SMs" for what in ("none", "0.016 MB") for held in (4, 32)
    }
    rest = [row for row in tiny if row not in beside]
    assert fitter.timed_rows(tiny) == fitter.timed_rows(rest) != []
    held = capsys.readouterr().out.rpartition("beside other stand-ins")[2].partition("fit")[0]
    assert [line.split("│")[2].strip() for line in held.splitlines() if "us │" in line] == [
        "4", "16", "32", "4", "16", "32"
    ]  # fmt: skip
    fitter.main([str(file) for file in files])  # parts of one run
    shown = capsys.readouterr().out
    assert "tiny keys, 10 us" in shown and "tiny, 40 us" in shown
    with pytest.raises(SystemExit):
        prefetch.main(["--tiny", "--readers", "70B", "--out", str(tmp_path)])


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_the_stand_in_compiles(harness: ModuleType, arch: str) -> None:
    try:
        find_toolchain()
    except NoCudaCompiler as error:
        pytest.skip(str(error))
    source = import_module("stand_in").StandInSpec().render("cuda")
    assert run_nvrtc(source.text, arch_named(arch), source.name).spill_bytes == 0
