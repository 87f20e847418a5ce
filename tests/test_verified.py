"""The recorded GPU run: it passed; a warning says when it no longer vouches for the sources, and a
release fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import gpu_record as record

from warploom.errors import StaleVerification

TESTS = Path(__file__).resolve().parent


def test_the_recorded_gpu_run_passed_and_is_of_these_sources() -> None:
    found = record.read()
    reason = record.complaint(found, record.digests())
    if reason is not None:
        warnings.warn(reason, StaleVerification, stacklevel=1)
    if found is not None:
        assert found["failed"] == 0
        assert found["passed"] > 0


def test_a_change_of_the_sources_is_noticed(tmp_path: Path) -> None:
    for name in ("codegen/a.py", "templates/b.cu.j2", "templates/include/deep/c.cuh"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    before = record.digests(tmp_path)
    assert list(before) == ["codegen", "templates", "templates/include"]
    (tmp_path / "codegen/a.pyc").write_text("not a source")
    assert record.digests(tmp_path) == before
    run = {"digests": before, "date": "2026-01-01", "gpu": "a GPU"}
    assert record.complaint(run, before) is None
    (tmp_path / "templates/include/deep/c.cuh").write_text("y")
    (tmp_path / "codegen/a.py").unlink()
    after = record.digests(tmp_path)
    said = str(record.complaint(run, after))
    assert said.startswith("codegen/, templates/include/ changed since the GPU run of 2026-01-01")
    assert "no GPU run is recorded" in str(record.complaint(None, after))
    assert record.read(tmp_path / "none.json") is None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the first step of a release looks at, with a record that is right."""
    for name in ("codegen/a.py", "templates/include/deep/c.cuh"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    for name in ("Makefile", "tests/support/gpu_record.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS.parent / name, tmp_path / name)
    run = {"date": "2026-01-01", "gpu": "a GPU", "passed": 9, "failed": 0}
    change_record(tmp_path, digests=record.digests(tmp_path), **run)
    return tmp_path


def change_record(checkout: Path, **changes: Any) -> None:
    path = checkout / "tests" / "gpu" / "verified.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps((record.read(path) or {}) | changes))


def said_by(*command: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_release_rests_on_a_run_of_its_sources_that_passed(checkout: Path) -> None:
    script = sys.executable, "tests/support/gpu_record.py"
    assert said_by(*script, folder=checkout) == (0, "")
    change_record(checkout, failed=2)
    status, text = said_by(*script, folder=checkout)
    assert status == 1
    assert text.startswith(
        "no release: in the GPU run of 2026-01-01 on a GPU, 2 tests failed and 9"
    )
    change_record(checkout, failed=0, passed=0)
    assert "0 tests failed and 0 passed" in said_by(*script, folder=checkout)[1]
    (checkout / "tests" / "gpu" / "verified.json").unlink()
    assert "no release: no GPU run is recorded" in said_by(*script, folder=checkout)[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_release_check_ends_where_the_record_is_old(checkout: Path) -> None:
    (checkout / "codegen" / "a.py").write_text("y")
    status, text = said_by("make", "release-check", f"RUN={sys.executable}", folder=checkout)
    assert status == 2
    assert "no release: codegen/ changed since the GPU run of 2026-01-01 on a GPU" in text
    assert not (checkout / "build" / "wheel").exists()


SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("passes", [True, True, True, False])
def test_on_a_gpu(passes):
    assert passes

@pytest.mark.gpu
def test_that_skips():
    pytest.skip("not here")

def test_without_a_gpu():
    pass
"""
CONFTEST = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import gpu_record

def write(outcomes, seconds):
    Path({path!r}).write_text(json.dumps(outcomes))

gpu_record.write = write

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.pluginmanager.register(gpu_record.Recorder())
"""


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ([], True),
        (["-m", "gpu", "-n", "2"], True),
        (["-n", "2", "-k", "on_a_gpu"], False),
    ],
)
def test_whole_runs_are_recorded_by_one_process_and_by_many(
    options: list[str], recorded: bool, tmp_path: Path
) -> None:
    if "-n" in options:
        pytest.importorskip("xdist")
    path, suite = tmp_path / "outcomes.json", tmp_path / "gpu"  # a folder's name is no marker
    suite.mkdir()
    (suite / "test_some.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(TESTS), path=str(path)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += ["-p", "xdist"] if "-n" in options else []
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=variables, check=False)
    assert path.exists() == recorded
    if recorded:
        assert json.loads(path.read_text()) == {"passed": 3, "failed": 1, "skipped": 1}
