"""The benchmark of a serving step compares what it times with torch's attention."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")


def test_all_ways_of_a_step_have_the_logits_of_sdpa(harness: ModuleType, tmp_path: Path) -> None:
    import llama_step  # pyright: ignore[reportMissingImports]

    llama_step.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    lines = (tmp_path / "llama_step_cpu.jsonl").read_text().splitlines()
    rows = {row["impl"]: row for row in map(json.loads, lines[1:])}
    assert list(rows) == ["no attention", "one tile", "two in turn", "one plan"]
    assert all(row["value"] > 0 and row["error"] < 1e-5 for row in rows.values())
