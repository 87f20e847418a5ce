"""The benchmark of graph pools measures what it says, where it is small."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

WAYS = {"eager", "pool, full", "pool, partial", "graph per size", "per size, one pool"}


def test_all_ways_are_timed_and_agree(harness: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    __import__("graph_pool").main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "graph_pool_cpu.jsonl")
    steps = {row.impl: row for row in rows if row.case == "tiny, 3 rows"}
    assert set(steps) == WAYS
    assert all(row.value > 0 and row.error < 1e-4 and not row.note for row in steps.values())
    held = {row.impl: row for row in rows if row.case == "tiny, memory"}
    assert set(held) == WAYS - {"eager"}
    assert [held[way].params["captures"] for way in sorted(held)] == [4, 4, 3, 3]
    assert held["pool, full"].value < held["per size, one pool"].value
    # each size holds what the largest does, at most; shared, the largest is all that is held
    assert held["per size, one pool"].value < held["graph per size"].value
    assert (tmp_path / "graph_pool_cpu.png").read_bytes().startswith(b"\x89PNG")
