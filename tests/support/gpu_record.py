"""`gpu/verified.json`: which templates and generator were last tested on a GPU, and how it went.

`tests/conftest.py` registers the recorder, and not that of `gpu`: with pytest-xdist tests are
collected, and that file is loaded, by workers only, but one record is written by whom they report
to. Tests warn where the record is old; `make release-check` runs this file, and fails there.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu" / "verified.json"
NEEDS_GPU = "needs", "gpu"  # a property of reports; their keywords also name folders
SUFFIXES = (".py", ".cuh", ".hpp", ".h", ".j2")


def digests(root: Path = ROOT) -> dict[str, str]:
    """SHA-256 of the sources in codegen/, in templates/ and in each of its folders.

    Hashed are paths and bytes. Folders have digests of their own, so that a record says which of
    them changed: kernels for a GPU hold nothing of templates/cpu.
    """
    templates = root / "templates"
    parts = {root / "codegen": "**/*", templates: "*"}
    parts |= {path: "**/*" for path in sorted(templates.iterdir()) if path.is_dir()}
    sources = {
        part: [path for path in sorted(part.glob(pattern)) if path.suffix in SUFFIXES]
        for part, pattern in parts.items()
    }
    return {
        part.relative_to(root).as_posix(): _digest(paths, root)
        for part, paths in sources.items()
        if paths
    }


def _digest(paths: list[Path], root: Path) -> str:
    found = hashlib.sha256()
    for path in paths:
        for piece in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            found.update(b"%d:" % len(piece) + piece)
    return found.hexdigest()


def machine() -> dict[str, Any]:
    """GPU, driver, and the versions that a kernel passed through."""
    import torch

    from warploom.codegen.compilers.headers import find_toolchain

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0].strip(),
        "torch": torch.__version__,
        "compiler": dict(find_toolchain().versions),
    }


def write(outcomes: dict[str, int], seconds: float, path: Path = RECORD) -> None:
    """Write the record of one whole run.

    Args:
        outcomes: how many tests passed, failed and were skipped.
        seconds: how long they took.
        path: file to write.
    """
    record = {
        "digests": digests(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **machine(),
        **{name: outcomes.get(name, 0) for name in ("passed", "failed", "skipped")},
        "seconds": round(seconds, 1),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def read(path: Path = RECORD) -> dict[str, Any] | None:
    """The record, or None if there is none."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def complaint(record: dict[str, Any] | None, current: dict[str, str]) -> str | None:
    """Why the record does not vouch for the sources at hand; None if it does."""
    if record is None:
        return "no GPU run is recorded; on a machine with a GPU run: make test-gpu"
    tested = record["digests"]
    folders = sorted(tested.keys() | current.keys())
    changed = [f"{name}/" for name in folders if tested.get(name) != current.get(name)]
    if changed:
        return (
            f"{', '.join(changed)} changed since the GPU run of {record['date']} on "
            f"{record['gpu']}; on a machine with a GPU run: make test-gpu"
        )
    return None


def refusal(record: dict[str, Any] | None, current: dict[str, str]) -> str | None:
    """Why no release can rest on the record; None if one can."""
    reason = complaint(record, current)
    if record is not None and reason is None and (record["failed"] or not record["passed"]):
        reason = (
            f"in the GPU run of {record['date']} on {record['gpu']}, {record['failed']} tests "
            f"failed and {record['passed']} passed; mend that, and on a machine with a GPU run: "
            "make test-gpu"
        )
    return reason and f"no release: {reason}"


class Recorder:
    """Counts the outcomes of GPU tests, and records them if none was left out."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.begin = time.monotonic()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if item.get_closest_marker("gpu"):
            item.user_properties.append(NEEDS_GPU)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if NEEDS_GPU not in map(tuple, report.user_properties):
            return
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.outcomes["passed"] and is_whole(session.config):
            write(dict(self.outcomes), time.monotonic() - self.begin)


def is_whole(config: pytest.Config) -> bool:
    """True if the command line chose no tests but by `-m gpu`, and this is no worker of many."""
    narrowed = config.option.keyword or getattr(config.option, "lf", False)
    files = [arg for arg in config.args if "::" in arg or Path(arg).suffix == ".py"]
    return not narrowed and not files and not hasattr(config, "workerinput")


if __name__ == "__main__":
    sys.exit(refusal(read(), digests()))
