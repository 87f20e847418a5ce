"""Traces of mixed batches become rows, and a sheet with a panel of each."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def mixed_traces(harness: ModuleType) -> ModuleType:
    return __import__("mixed_traces")


def test_each_batch_has_a_row_and_a_panel(mixed_traces: ModuleType, tmp_path: Path) -> None:
    names = ["1k/8k/32", "2k/16k/64"]
    mixed_traces.main(["--device", "cpu", "--cases", ",".join(names), "--out", str(tmp_path)])
    lines = (tmp_path / "mixed_traces.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["case"] for row in rows[1:]] == names
    assert all(row["span_us"] > 0 and 0 < row["busy"] <= 1 for row in rows[1:])
    assert (tmp_path / "mixed_traces.png").stat().st_size > 10_000


def test_panels_have_all_items(mixed_traces: ModuleType) -> None:
    (batch,) = mixed_traces.batches_of("1k/8k/32", "", small=True)
    trace = mixed_traces.traced(batch, torch.device("cpu"))
    figure = mixed_traces.sheet({"first": trace, "second": trace})
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left").split(":")[0] for axes in shown] == ["first", "second"]
    for axes in shown:
        assert sum(len(found.get_paths()) for found in axes.collections) == len(trace.items)
