"""The benchmark of orders has each of them, compares results, and reads savings off its rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def orders(harness: ModuleType) -> ModuleType:
    return import_module("prefetch_orders")


def test_each_order_has_its_rows(
    orders: ModuleType, harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders.main(["--tiny", "--captures", "1", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "prefetch_orders.jsonl")
    cases = [f"tiny, {us} us" for us in (10, 20, 40)]
    granule = import_module("warploom.serving.prefetch.blocks").GRANULE
    asked = [0, 16_000, 16_000, *[16_000 // granule * granule] * 2]
    assert [row.case for row in rows] == [case for case in cases for _ in range(5)]
    for case in cases:
        own = [row for row in rows if row.case == case]
        ways = ["none", *(f"0.016 MB, {order}" for order in orders.ORDERS)]
        assert [row.impl for row in own] == ways
        without = own[0].value
        for row in own:
            at = row.params
            assert row.error == 0.0 and row.value > at["collective_us"]
            assert at["saved_us"] == pytest.approx(without - row.value, abs=2e-3)
        assert [row.params["asked"] for row in own] == asked
        assert all(row.params["bandwidth"] > 0 for row in own)
        assert len(own[0].params["captures_us"]) == 2 and len(own[1].params["captures_us"]) == 1
    assert "us saved" in capsys.readouterr().out
    fitter = import_module("fit_prefetch")  # one order at a time
    kept = [row for row in rows if row.params["order"] in ("", "columns kept")]
    assert [one.keep and one.ordered for one in fitter.timed_rows(kept)] == [True] * 3
    assert [one.asked for one in fitter.timed_rows(kept)] == [asked[-1]] * 3
    assert not any(one.ordered for one in fitter.timed_rows(rows)[::4])
    fitter.main([str(tmp_path / "prefetch_orders.jsonl"), "--order", "columns kept"])
    assert "tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        orders.main(["--tiny", "--readers", "70B", "--out", str(tmp_path)])


def test_another_result_is_no_figure(
    orders: ModuleType, harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spoilt(stand_in: object, reader: object, seconds: float, budget: int, sms: int) -> object:
        return reader.read() + bool(budget)  # type: ignore[attr-defined]

    monkeypatch.setattr(orders, "step", spoilt)
    orders.main(["--tiny", "--captures", "1", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "prefetch_orders.jsonl")
    assert all((row.value is None) == ("MB" in row.impl) for row in rows)
    assert all(row.note.startswith("wrong") for row in rows if "MB" in row.impl)


def test_the_table_has_the_best_order_in_bold(orders: ModuleType, harness: ModuleType) -> None:
    saved = dict(zip(orders.ORDERS, (0.5, -0.25, 1.25, 1.0), strict=True))
    rows = [
        harness.Row("t", "a, 10 us", order, 1.0, "us",
                    params={"budget": 8_000_000, "order": order, "saved_us": us})
        for order, us in saved.items()
    ]  # fmt: skip
    table = orders.saved_table(rows)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["a, 10 us", "8 MB", "0.50", "-0.25", "[bold]1.25[/bold]", "1.00"]


def test_bits_that_differ(orders: ModuleType) -> None:
    one = torch.tensor([1.0, 2.0])
    assert orders._difference(one, one.clone()) == 0.0
    assert orders._difference(one, torch.tensor([1.0, 2.5])) == 0.5
    assert orders._difference(one, torch.tensor([1.0, torch.nan])) == float("inf")
