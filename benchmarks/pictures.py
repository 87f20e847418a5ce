"""The picture of a benchmark's rows, where there is something to draw with."""

from __future__ import annotations

from pathlib import Path

from harness import Report


def picture(report: Report, folder: Path) -> None:
    """Draw the rows beside the JSON lines, where matplotlib is installed."""
    try:
        from plot import draw
    except ModuleNotFoundError:
        report.console.print("no picture: matplotlib is not installed")
        return
    draw(report.benchmark, report.facts, report.rows, folder / f"{report.benchmark}.png")
