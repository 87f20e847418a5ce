"""The benchmark of beams runs, small and on the CPU, and times no wrong result."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


def test_every_table_has_its_rows(harness: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import_module("beams").main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    found = {}
    for name in ("attention", "top_k", "host"):
        _, rows = harness.load_rows(tmp_path / f"beams_{name}.jsonl")
        assert all(row.value is not None and row.value > 0 for row in rows), rows
        found[name] = {(row.case, row.impl): row for row in rows}
        assert (tmp_path / f"beams_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert {impl for _, impl in found["attention"]} == {"warploom", "single format", "pages of 1"}
    assert all(0 < row.error < 1e-2 for row in found["attention"].values())
    heap, sort = (found["top_k"]["64 x 64", impl].params for impl in ("heap", "full sort"))
    assert heap["seen"] < sort["seen"] == sort["candidates"] == 64 * 64
    ways = {"reorder", "page tables", "plan", "plan, single", "finding prefixes"}
    assert {impl for _, impl in found["host"]} == ways
    one = {impl: row.value for (_, impl), row in found["host"].items()}
    assert one["finding prefixes"] < one["plan"], "it is part of it"
