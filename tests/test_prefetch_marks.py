"""The benchmark of marks has each of them, compares results, and reads savings off its rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def marks(harness: ModuleType) -> ModuleType:
    return import_module("prefetch_marks")


def test_each_mark_has_its_rows(
    marks: ModuleType, harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks.main(["--tiny", "--captures", "1", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "prefetch_marks.jsonl")
    cases = [f"tiny, {us} us" for us in (10, 20, 40)]
    assert [row.case for row in rows] == [case for case in cases for _ in range(3)]
    for case in cases:
        own = [row for row in rows if row.case == case]
        assert [row.impl for row in own] == ["none", "0.016 MB, plain", "0.016 MB, kept"]
        without = own[0].value
        for row in own:
            at = row.params
            assert row.error == 0.0 and row.value > at["collective_us"]
            assert at["saved_us"] == pytest.approx(without - row.value, abs=2e-3)
        assert [row.params["asked"] for row in own] == [0, 16_000, 16_000]
        assert [row.params["keep"] for row in own] == [False, False, True]
        assert all(row.params["bandwidth"] > 0 for row in own)
        assert len(own[0].params["captures_us"]) == 2 and len(own[1].params["captures_us"]) == 1
    assert "us saved" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        marks.main(["--tiny", "--readers", "70B", "--out", str(tmp_path)])


def test_either_mark_is_fitted_alone(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitter = import_module("fit_prefetch")
    fitted: list[list[str]] = []
    real = fitter.checked_fit

    def noted(rows: list[object], *rest: object) -> object:
        fitted.append([row.impl for row in rows])  # type: ignore[attr-defined]
        return real(rows, *rest)

    monkeypatch.setattr(fitter, "checked_fit", noted)
    recorded = str(harness.RESULTS / "prefetch_marks.jsonl")
    for options, way, other in (([], "plain", "kept"), (["--kept"], "kept", "plain")):
        fitter.main([recorded, *options])
        text = " ".join(fitted[-1])
        assert way in text and other not in text and "none" in text
    with pytest.raises(SystemExit, match="no step"):
        fitter.main(["--kept"])  # of prefetch.py's steps none is marked


def test_another_result_is_no_figure(
    marks: ModuleType, harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spoilt(stand_in: object, reader: object, seconds: float, budget: int, sms: int) -> object:
        return reader.read() + bool(budget)  # type: ignore[attr-defined]

    monkeypatch.setattr(marks, "step", spoilt)
    marks.main(["--tiny", "--captures", "1", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "prefetch_marks.jsonl")
    assert all((row.value is None) == ("MB" in row.impl) for row in rows)
    assert all(row.note.startswith("wrong") for row in rows if "MB" in row.impl)


def test_the_table_has_the_better_mark_in_bold(marks: ModuleType, harness: ModuleType) -> None:
    rows = [
        harness.Row("t", "a, 10 us", "8 MB", 1.0, "us",
                    params={"budget": 8_000_000, "keep": keep, "saved_us": us})
        for keep, us in ((False, -0.25), (True, 1.25))
    ]  # fmt: skip
    table = marks.saved_table(rows)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["a, 10 us", "8 MB", "-0.25", "[bold]1.25[/bold]"]


def test_bits_that_differ(marks: ModuleType) -> None:
    one = torch.tensor([1.0, 2.0])
    assert marks._difference(one, one.clone()) == 0.0
    assert marks._difference(one, torch.tensor([1.0, 2.5])) == 0.5
    assert marks._difference(one, torch.tensor([1.0, torch.nan])) == float("inf")
