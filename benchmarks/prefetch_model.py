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
    PAPER,
    best_bytes,
    comparisons,
    densities,
    latencies,
    predict,
    predictions,
    scale_out,
    speedup_by_l2_bandwidth,
    speedup_by_link,
)
from warploom.serving.prefetch.exploration import CLUSTERS, GIGABITS, TERAOPS
from warploom.serving.prefetch.predictions import CHIPS, COLLECTIVES, all_reads

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "prefetch_model.png"


def comparison_table() -> Table:
    table = Table("number", "paper", "here", "error", "", title="PRESERVE's numbers")
    for one in comparisons():
        cells = f"{one.paper:g}", f"{one.here:.3g}", f"{100 * one.error:+.1f} %"
        table.add_row(one.what, *cells, "measured" if one.measured else "")
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

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.4), layout="constrained")
    drawings = (_draw_latencies, _draw_densities, _draw_links, _draw_l2, _draw_scale, _draw_budgets)
    for ax, drawing in zip(axes.flat, drawings, strict=True):
        drawing(ax)
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


def _draw_links(axes: Any) -> None:
    axes.plot(GIGABITS, [speedup_by_link(at) for at in GIGABITS], "o-", label="here")
    axes.plot((200, 1000), (1.18, 1.27), "kx", label="paper's text")
    axes.set(title="Speed-up by link (paper, fig. 8)", xlabel="Gbit/s", ylabel="mean of models")
    axes.legend(fontsize=7)


def _draw_l2(axes: Any) -> None:
    for times in (2.5, 5, 10):
        bandwidth = times * PAPER.memory_bandwidth / 1e12
        found = [speedup_by_l2_bandwidth(bandwidth, at) for at in TERAOPS]
        axes.plot(TERAOPS, found, "o-", label=f"L2 of {bandwidth:.1f} TB/s")
    axes.set_xscale("log", base=2)
    axes.set(title="Speed-up by L2 (paper, fig. 9)", xlabel="TOP/s", ylabel="mean of models")
    axes.legend(fontsize=7)


def _draw_scale(axes: Any) -> None:
    """Speed-up on the left, microseconds on the right."""
    points = [scale_out(devices) for devices in CLUSTERS]
    axes.plot(CLUSTERS, [one.speedup for one in points], "ko-", label="speed-up")
    axes.set_xscale("log", base=2)
    axes.set(title="Scale-out (paper, fig. 10)", xlabel="devices", ylabel="speed-up of decoding")
    right = axes.twinx()
    for name in ("collective", "attention", "mlp"):
        right.plot(CLUSTERS, [1e6 * getattr(one, name) for one in points], "--", label=name)
    right.set(ylabel="us (dashes)")
    right.legend(fontsize=7)


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
