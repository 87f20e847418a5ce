"""The README's picture, of recorded figures: prefill, a variant of the user's own, decoding.

python benchmarks/overview.py [FOLDER]     reads FOLDER/*.jsonl, writes FOLDER/overview.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import RESULTS, Row, load_rows
from plot import draw_bars, draw_lines


@dataclass(frozen=True)
class Panel:
    """One part of the picture.

    Attributes:
        benchmark: the recorded benchmark.
        title: what it shows.
        draw: how.
        cases: the cases shown, and what they are called there.
        unlike: implementations that are left out.
    """

    benchmark: str
    title: str
    draw: Callable[[Any, Sequence[Row]], None]
    cases: Mapping[str, str]
    unlike: tuple[str, ...] = ()

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        return [
            replace(row, case=self.cases[row.case])
            for row in rows
            if row.case in self.cases and row.impl not in self.unlike
        ]


PANELS = (
    Panel(
        "prefill", "causal prefill, 16 heads of 128, fp16", draw_lines,
        {f"causal {n}": n for n in ("512", "1k", "2k", "4k", "8k", "16k")},
    ),
    Panel(
        "prefill_own", "a transform or mask of the user's own", draw_bars,
        {f"own {kind} {n}": f"{kind} {n}" for n in ("1k", "8k") for kind in ("transform", "mask")},
        ("warploom causal",),
    ),
    Panel(
        "decode", "decode, pages of 16, 16 requests, heads 32/8, bf16", draw_bars,
        {
            "16 x 1024, 32/8": "1k", "16 x uniform 512-1024, 32/8": "uniform",
            "16 x zipf, mean 1024, 32/8": "zipf", "16 x 8192, 32/8": "8k",
            "16 x skewed 8k-64k, 32/8": "8k-64k",
        },
    ),
)  # fmt: skip


def draw_overview(folder: Path, path: Path) -> None:
    """One panel for each kind of work.

    Args:
        folder: of the recorded figures.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, len(PANELS), figsize=(13.5, 3.7), layout="constrained")
    machine: dict[str, Any] = {}
    for axes, panel in zip(places, PANELS, strict=True):
        machine, recorded = load_rows(folder / f"{panel.benchmark}.jsonl")
        rows = panel.rows(recorded)
        panel.draw(axes, rows)
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(f"{rows[-1].unit}, higher is better", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.supxlabel(f"{machine['device']}, torch {machine['torch']}", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    folder = Path(given[0]) if given else RESULTS
    draw_overview(folder, folder / "overview.png")
    print(folder / "overview.png")


if __name__ == "__main__":
    main()
