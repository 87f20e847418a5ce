"""What was measured of warploom that a simulation needs, read from the recorded figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from warploom.simulation_errors import NoMeasurement


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the number of requests."""

    fixed: float
    each: float

    def __call__(self, requests: float) -> float:
        return self.fixed + self.each * requests

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Line:
        """By least squares."""
        requests, seconds = np.array(list(points)).T
        each, fixed = np.polyfit(requests, seconds, 1)
        return cls(float(fixed), float(each))


@dataclass(frozen=True)
class Measured:
    """Figures of `benchmarks/results`.

    Attributes:
        throughput: operations a second of a large product in 16 bits (`prefill.jsonl`).
        bandwidth: bytes a second of a large read (`decode.jsonl`).
        mixed_plan: host seconds of a plan with prompts and decodes in two roles, by requests
            (`plan_us` of `role_sweep.jsonl`).
        planner_kernel: seconds of the planner as a kernel (`decode_step.jsonl`).
        append_kernel: of appending a token to each request (`append.jsonl`); replacing placeholders
            is taken to cost as much.
    """

    throughput: float
    bandwidth: float
    mixed_plan: Line
    planner_kernel: Line
    append_kernel: Line


# What `read_measured` finds, for those who have no recorded figures beside them. Rates and kernels
# are an H200's; mixed plans are of the host of an H100.
RECORDED = Measured(
    throughput=672.4e12,
    bandwidth=4472.6e9,
    mixed_plan=Line(185.897e-6, 0.836181e-6),
    planner_kernel=Line(7.39544e-6, 0.00361782e-6),
    append_kernel=Line(2.75e-6, 0.005204e-6),
)
# Plans of decodes alone, through one wrapper from int32 arrays: 29.5 us at 128 requests and 71.5 at
# 1,024, the middles of what docs/performance.md has from a host of an H200; no rows are kept of it.
DECODE_PLAN = Line.through([(128, 29.5e-6), (1024, 71.5e-6)])


def read_measured(folder: Path | str) -> Measured:
    """Read the figures of a folder such as `benchmarks/results`.

    Raises:
        NoMeasurement: a file or a row is missing, and which command makes it.
    """
    folder = Path(folder)
    return Measured(
        throughput=1e12 * _ceiling(folder, "prefill", "matmul"),
        bandwidth=1e9 * _ceiling(folder, "decode", "read"),
        mixed_plan=Line.through(
            (row["params"]["batch"], 1e-6 * row["params"]["plan_us"])
            for row in _rows(folder, "role_sweep", "plan_us", "mixed.py")
            if "plan_us" in row["params"]
        ),
        planner_kernel=Line.through(_times(folder, "decode_step", "warploom plan", "decode.py")),
        append_kernel=Line.through(_times(folder, "append", "warploom", "append.py")),
    )


def _rows(folder: Path, file: str, what: str, script: str) -> Iterator[dict[str, Any]]:
    """Rows with a figure; raises NoMeasurement where none says `what`."""
    path = folder / f"{file}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [row for row in map(json.loads, lines) if row.get("value") is not None]
    if not any(what in row["impl"] or what in row["params"] for row in rows):
        command = f"python benchmarks/{script}"
        raise NoMeasurement(file=path.name, what=what, command=command)
    yield from rows


def _ceiling(folder: Path, file: str, what: str) -> float:
    for row in _rows(folder, file, what, f"{file}.py"):
        if row["case"] == "ceiling" and what in row["impl"]:
            return float(row["value"])
    raise NoMeasurement(file=f"{file}.jsonl", what=what, command=f"python benchmarks/{file}.py")


def _times(folder: Path, file: str, impl: str, script: str) -> Iterator[tuple[float, float]]:
    """Requests and seconds of rows with one new token for each, in 16 bits and untransformed."""
    for row in _rows(folder, file, impl, script):
        requests = row["params"].get("requests", row["params"].get("batch"))
        tokens = row["params"].get("new", requests)
        plain = row["case"].endswith("bf16") or file != "append"
        if row["impl"] == impl and requests == tokens and plain:
            yield requests, 1e-3 * row["ms"]
