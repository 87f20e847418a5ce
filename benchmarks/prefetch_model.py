"""The model of prefetching beside the paper's figures, and what it says of H100, H200 and B200.

    python benchmarks/prefetch_model.py [PICTURE]

Prints two tables and draws docs/images/prefetch_model.png, or PICTURE. Nothing is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from warploom.prefetch import (
    L2_MEGABYTES,
    MODELS,
    best_bytes,
    comparisons,
    densities,
    latencies,
    predict,
    predictions,
)
from warploom.serving.prefetch.predictions import CHIPS, COLLECTIVES, all_reads

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "prefetch_model.png"


def comparison_table() -> Table:
    table = Table("number", "paper", "here", "error", title="PRESERVE's design space exploration")
    for one in comparisons():
        table.add_row(one.what, f"{one.paper:g}", f"{one.here:.3g}", f"{100 * one.error:+.1f} %")
    return table


def prediction_table() -> Table:
    columns = [f"{1e6 * seconds:.0f} us" for seconds in COLLECTIVES]
    title = "Step from the collective on: MB to prefetch, and time saved"
    table = Table("GPU", "reads", "MB", *columns, title=title)
    rows = list(predictions())
    for chip in CHIPS:
        for reads in all_reads():
            mine = [x for x in rows if (x.chip, x.reads) == (chip, reads)]
            cells = [f"{x.budget / 1e6:.0f}, {100 * x.saved:.0f} %" for x in mine]
            table.add_row(chip.name, reads.name, f"{reads.bytes / 1e6:.0f}", *cells)
    return table


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    _draw_latencies(axes[0])
    _draw_densities(axes[1])
    _draw_budgets(axes[2])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_latencies(axes: Any) -> None:
    for i, model in enumerate(MODELS):
        style = {"color": f"C{i % 6}", "ls": "--" if i >= 6 else "-"}
        axes.plot(L2_MEGABYTES, latencies(model), lw=1, label=model.name, **style)
    axes.set(title="Decoding by L2 (paper, fig. 6)", xlabel="L2, MB", ylabel="of that at 8 MB")
    axes.legend(fontsize=6, ncols=2)


def _draw_densities(axes: Any) -> None:
    for flag, name in ((True, "with prefetches"), (False, "without")):
        axes.plot(L2_MEGABYTES, densities(flag), label=name)
    axes.set(title="Cost (paper, fig. 7)", xlabel="L2, MB", ylabel="tokens/s/mm2")
    axes.legend(fontsize=7)


def _draw_budgets(axes: Any) -> None:
    """Where prefetching begins to pollute, beside a collective of 10 us."""
    budgets = [n * 1e6 for n in range(0, 101)]
    size, collective = all_reads()[-1].bytes, 10e-6
    for chip in CHIPS:
        saved = [1e6 * predict(chip, collective, size, n).saved for n in budgets]
        axes.plot([n / 1e6 for n in budgets], saved, label=chip.name)
        best = best_bytes(chip, collective, size)
        axes.plot(best / 1e6, 1e6 * predict(chip, collective, size, best).saved, "k.", ms=7)
    title = "Predicted: 10 us, then a 70B/TP8 MLP"
    axes.set(title=title, xlabel="MB asked for (dot: chosen)", ylabel="us saved")
    axes.legend(fontsize=7)


def main(arguments: list[str]) -> None:
    console = Console(width=120)
    console.print(comparison_table())
    console.print(prediction_table())
    path = Path(arguments[0]) if arguments else PICTURE
    draw(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
