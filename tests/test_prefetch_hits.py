"""Hits that ncu counts of prefetched bytes: its text is read right, and each read gets its own."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
METRICS = "lts__t_sectors_op_read_lookup_hit.sum", "lts__t_sectors_op_read.sum"

# Runs what it is given, as ncu does, and writes two kernels for each of two reads.
NCU = f"""#!{sys.executable}
import subprocess, sys
given = sys.argv[1:]
log, nvtx = (given[given.index(name) + 1] for name in ("--log-file", "--nvtx-include"))
assert nvtx == "read/" and given[given.index("--replay-mode") + 1] == "application"
subprocess.run(given[given.index(sys.executable):], check=True)
hits, lines = (100, 20, 600, 21), ['==PROF== Connected', {HEAD!r}]
for at, count in enumerate(hits):
    for name, value in zip({METRICS!r}, (count, 1000)):
        lines.append(f'"{{at}}","7","gemv","{{name}}","sector","{{value:,}}"')
open(log, "w").write("\\n".join(lines))
"""


@pytest.fixture
def hits(harness: ModuleType) -> ModuleType:
    return import_module("prefetch_hits")


def test_ncus_text_by_kernel_in_the_order_of_launches(hits: ModuleType) -> None:
    lines = [
        "==PROF== Profiling", HEAD,
        f'"10","7","gemv","{METRICS[0]}","sector","1,234"',
        f'"10","7","gemv","{METRICS[1]}","sector","5,000,000"',
        f'"2","7","gemv","{METRICS[0]}","sector","7"',
        f'"2","7","gemv","{METRICS[1]}","sector","8"',
    ]  # fmt: skip
    found = hits.counted("\n".join(lines))
    assert found == [
        {METRICS[0]: 7, METRICS[1]: 8},
        {METRICS[0]: 1234, METRICS[1]: 5_000_000},
    ]
    assert hits.per_read(found, 1) == [{METRICS[0]: 1241, METRICS[1]: 5_000_008}]
    for kernels, reads in ((found, 3), ([], 1)):
        with pytest.raises(SystemExit, match="kernels for"):
            hits.per_read(kernels, reads)


def test_hits_that_a_prefetch_adds(
    hits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole script on the CPU, with a program in ncu's place that counts made-up hits."""
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hits.main(["--tiny", "--out", str(tmp_path)])
    lines = (tmp_path / "prefetch_hits.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    cases = ["tiny", "tiny, kept", "tiny keys"]
    assert [row["case"] for row in found] == [case for case in cases for _ in range(2)]
    with pytest.raises(SystemExit):
        hits.main(["--tiny", "--readers", "no such", "--out", str(tmp_path)])
    for plain, row in zip(found[::2], found[1::2], strict=True):
        assert plain["value"] is None and plain["impl"] == "none"
        at = row["params"]
        assert 0 < at["asked"] <= 30_000 and at["sectors"] == 2000
        assert (at["hits"], at["hits_without"]) == (621, 120)
        assert row["value"] == pytest.approx(100 * 501 * 32 / at["asked"])


def test_a_machine_without_ncu(
    hits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="Nsight"):
        hits.main(["--tiny", "--out", str(tmp_path)])
