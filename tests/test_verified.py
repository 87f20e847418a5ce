"""The recorded GPU run: it passed, and a warning says when it no longer vouches for the sources."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from warploom.errors import StaleVerification

RECORD = Path(__file__).resolve().parent / "gpu" / "record.py"


@pytest.fixture
def record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("warploom_gpu_record", RECORD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recorded_gpu_run_passed_and_is_of_these_sources(record: ModuleType) -> None:
    found = record.read()
    reason = record.complaint(found, record.digest())
    if reason is not None:
        warnings.warn(reason, StaleVerification, stacklevel=1)
    if found is not None:
        assert found["failed"] == 0
        assert found["passed"] > 0


def test_a_change_of_the_sources_is_noticed(record: ModuleType, tmp_path: Path) -> None:
    for name in ("codegen/a.py", "templates/include/b.cuh"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("x")
    before = record.digest(tmp_path)
    (tmp_path / "codegen/a.pyc").write_text("not a source")
    assert record.digest(tmp_path) == before
    (tmp_path / "templates/include/b.cuh").write_text("y")
    after = record.digest(tmp_path)
    assert after != before
    run = {"digest": before, "date": "2026-01-01", "gpu": "a GPU"}
    assert record.complaint(run, before) is None
    assert "changed since the GPU run of 2026-01-01 on a GPU" in record.complaint(run, after)
    assert "no GPU run is recorded" in record.complaint(None, after)
    assert record.read(tmp_path / "none.json") is None
