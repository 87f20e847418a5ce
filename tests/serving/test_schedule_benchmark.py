"""The benchmark of schedules runs, small and on the CPU; its tables are right."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small wait for a second thread longer than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_schedule_has_its_row_and_the_same_tokens(
    harness: ModuleType, one_thread: None, tmp_path: Path
) -> None:
    benchmark = import_module("async_schedule")
    benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "async_schedule_cpu.jsonl")
    assert [row.impl for row in rows] == list(benchmark.WAYS)
    for row in rows:
        assert row.value is not None, row.note
        assert row.params["same_as_first"] == 1.0
        parts = sum(row.params[f"{part}_us"] for part in ("plan", "wait", "read"))
        assert row.params["simulated_ms"] >= 0.99 * row.params["device_ms"] > 0 < parts


def test_tables_of_host_and_device_are_one(harness: ModuleType) -> None:
    """And no page belongs to two requests, over a step that opens pages and one that fills them."""
    decoder, shape = import_module("stand_in_decoder"), import_module("async_schedule").TINY
    tables = decoder.Tables(shape, torch.device("cpu"))
    for step in range(1, shape.steps + 1):
        tables.advance()
        lens = np.full(shape.requests, shape.length + step)
        rows, indptr, indices, last = tables.on_host(lens)
        assert tables.rows.tolist() == rows.tolist()
        assert tables.indptr.tolist() == indptr.tolist()
        assert tables.indices[: indptr[-1]].tolist() == indices.tolist()
        assert tables.last.tolist() == last.tolist()
        assert len(set(indices.tolist())) == indptr[-1]
        assert ((np.diff(indptr) - 1) * decoder.PAGE + last == lens).all()


def test_a_schedule_that_mixes_its_tokens_up_has_no_figure(harness: ModuleType) -> None:
    benchmark = import_module("async_schedule")
    shape = benchmark.TINY
    assert benchmark.row("x", shape, "serial", [1.0], True, {}).value == 1.0
    wrong = benchmark.row("x", shape, "serial", [1.0], False, {})
    assert wrong.value is None and wrong.note == "wrong: other tokens"
