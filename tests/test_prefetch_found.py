"""What readers find, by the order of asking: the fit finds constants that counts were made with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.errors import ArgumentError
from warploom.prefetch import H200, Overlap

MB = 1e6
MODEL = Overlap(1.0, 0.0, 1.0, 30 * MB, 1.0, 0.0, 0.0, 0.0, streamed=40 * MB, marked=10 * MB)
BYTES = st.floats(1.0, 400 * MB)


@pytest.fixture
def fitter(harness: ModuleType) -> ModuleType:
    return __import__("fit_found")


@pytest.mark.parametrize(
    ("asked", "size", "ordered", "keep", "found"),
    [
        (20, 200, True, False, 20),
        (40, 200, True, True, 30),  # more drives out as much
        (20, 200, False, False, 4),  # a fifth of the reader's bytes are read while they are there
        (20, 40, False, False, 20),
        (20, 200, False, True, 10 + 2),
        (8, 200, False, True, 8),
        (20, 10, False, False, 10),
    ],
)
def test_by_hand(asked: float, size: float, ordered: bool, keep: bool, found: float) -> None:
    said = MODEL.found(asked * MB, size * MB, ordered, keep)
    assert said == pytest.approx(found * MB)
    hits, _ = MODEL.parts(0.1, size * MB, asked * MB, 1, ordered, keep)
    assert hits * MODEL.bandwidth <= said  # what has come of it


@given(asked=BYTES, size=BYTES)
def test_order_and_marks_never_harm(asked: float, size: float) -> None:
    plain, marked = (MODEL.found(asked, size, False, keep) for keep in (False, True))
    ordered = MODEL.found(asked, size)
    assert 0 <= plain <= marked <= ordered <= asked
    unknown = replace(MODEL, streamed=inf, marked=0.0)  # of a GPU whose hits were not counted
    assert unknown.found(asked, size, False) == ordered


def test_a_prefetch_out_of_order_saves_less() -> None:
    gpu = replace(MODEL, bandwidth=4e12, rate=5e11, hit_rate=8e12)
    in_order, not_so = (gpu.saved(40e-6, 200 * MB, 20 * MB, 8, x) for x in (True, False))
    assert in_order == pytest.approx(0.5 * 20 * MB / 4e12) and not_so == pytest.approx(in_order / 5)


def test_constants_that_are_none() -> None:
    for wrong in ({"streamed": 0.0}, {"marked": -1.0}):
        with pytest.raises(ArgumentError, match="overlap"):
            replace(MODEL, **wrong)


def recorded(
    harness: ModuleType, model: Overlap, orders: dict[str, tuple[bool, bool]]
) -> list[Any]:
    rows = []
    sizes = {"large": 235 * MB, "half": 117 * MB}
    for (name, size), (order, how), mb in product(sizes.items(), orders.items(), (0, 4, 16, 60)):
        asked = mb * MB
        value = 100 * model.found(asked, size, *how) / asked if asked else None
        params = {"asked": asked, "bytes": size, "order": order}
        rows.append(
            harness.Row("prefetch_hits", f"{name}, {order}", "t", value, "%", params=params)
        )
    keys = {"asked": 4 * MB, "bytes": 134 * MB, "order": ""}
    return [*rows, harness.Row("prefetch_hits", "keys", "t", 91.0, "%", params=keys)]


def orders(fitter: ModuleType) -> dict[str, tuple[bool, bool]]:
    """Whether in the reader's order, and marked."""
    return dict(fitter.ORDERS)


def test_the_fit_finds_what_counts_were_made_with(harness: ModuleType, fitter: ModuleType) -> None:
    kept = H200.budget
    for streamed, marked in ((fitter.STREAMED[40], 12 * MB), (fitter.STREAMED[60], 0.0)):
        truth = replace(fitter.without_found(kept), streamed=float(streamed), marked=marked)
        counted = fitter.counted_rows(recorded(harness, truth, orders(fitter)))
        assert len(counted) == 2 * 4 * 3  # no keys, and nothing without a prefetch
        assert fitter.fitted(counted, kept) == (streamed, marked)
    in_order = [x for x in counted if x.ordered]
    assert fitter.fitted(in_order, kept) == (inf, 0.0)


def test_readers_that_were_left_out_are_told_of(
    harness: ModuleType, fitter: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed = float(fitter.STREAMED[50])
    truth = replace(fitter.without_found(30 * MB), streamed=streamed, marked=12 * MB)
    rows = recorded(harness, truth, orders(fitter))
    off = [x for x in rows if x.case.startswith("half")]  # moves no constant
    rows = [replace(x, value=x.value and 1.0) if x in off else x for x in rows]
    report = harness.Report("prefetch_hits", __import__("torch").device("cpu"), tmp_path)
    for row in rows:
        report.add(row)
    capsys.readouterr()
    fitter.main([str(tmp_path / "prefetch_hits.jsonl")])
    shown = capsys.readouterr().out
    assert "marked=12.0e6" in shown
    told = f"{16 * streamed / (117 * MB):.1f}"
    line = next(x for x in shown.splitlines() if "half, rows " in x and " 16.0 " in x)
    assert [cell.strip() for cell in line.split("│")[2:5]] == ["16.0", "0.2", told]
    none = tmp_path / "none.jsonl"
    none.write_text((tmp_path / "prefetch_hits.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(SystemExit, match="no order"):
        fitter.of_file(none)
