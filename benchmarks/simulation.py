"""Schedules in simulation: xLLM's reported gains beside those simulated, and timelines.

    python benchmarks/simulation.py [PICTURE]

Prints three tables and draws docs/images/simulation.png, or PICTURE. Nothing is measured here;
costs are those that `benchmarks/results` has; `docs/simulation.md` says what is assumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from warploom.serving.simulation.comparisons import (
    PROMPTS_OF_TABLE_7,
    QWEN_1_5B,
    R1_LIKE,
    decode,
    decodes,
    small_host,
    streams_of_ours,
)
from warploom.serving.simulation.costs import Section
from warploom.serving.simulation.steps import Step
from warploom.simulate import (
    Asynchronous,
    Comparison,
    Deployment,
    DualStreams,
    Engine,
    Limits,
    Result,
    RooflineCosts,
    Schedule,
    Serial,
    comparisons,
    draw_timelines,
    simulate,
    synthetic,
)

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "simulation.png"
SCHEDULES: dict[str, Schedule] = {
    "serial": Serial(),
    "ahead": Asynchronous(knows_ends=True),
    "by device": Asynchronous(device_planner=True, knows_ends=True),
}


def comparison_table(found: list[Comparison]) -> Table:
    table = Table("gain", "unit", "xLLM", "simulated", title="xLLM's figures and a simulation")
    for one in found:
        note = " (fitted)" if one.fitted else ""
        table.add_row(one.what, one.unit, _short(one.reported), _short(one.simulated) + note)
    return table


def _short(figure: float) -> str:
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


def schedule_table() -> Table:
    """What the host's plans alone cost, and with as much host time as xLLM's gain speaks of."""
    columns = "host", "schedule", "tokens/s", "TPOT, ms", "device idle"
    table = Table(*columns, title="1.5B, 32 requests, on the figures of an H200")
    fitted = small_host(QWEN_1_5B)
    costs = {"plans alone": replace(fitted, engine=Engine()), "fitted": fitted}
    for host, one in costs.items():
        for name, schedule in SCHEDULES.items():
            ran = decode(one, schedule)
            idle = f"{100 * ran.idle('device'):.1f} %"
            table.add_row(host, name, f"{ran.throughput:.0f}", f"{1e3 * ran.tpot():.3f}", idle)
    return table


def stream_table() -> Table:
    """What splitting a batch reads twice, what it can hide at most, and what it saves."""
    columns = "batch of a group", "transfers", "more computation", "saved, %"
    table = Table(*columns, title="R1-like on two streams, 32 groups; us a layer")
    batches = {f"{n} decodes": decodes([4000] * n) for n in (64, 128, 192, 256, 512)}
    costs = RooflineCosts(R1_LIKE, groups=32)
    for name, batch in {**batches, "7 prompts of 1024": PROMPTS_OF_TABLE_7}.items():
        step, streams = Step(0, (batch,) * 32), DualStreams()
        computed, moved = seconds_of(costs.layer(step, 1.0, 1.0))
        halves = [
            seconds_of(costs.layer(half, streams.compute, streams.communication))[0]
            for half in step.micro(2)
        ]
        more = f"{1e6 * (sum(halves) - computed):.0f}"
        table.add_row(name, f"{1e6 * moved:.0f}", more, f"{streams_of_ours(batch):.1f}")
    return table


def seconds_of(sections: Sequence[Section]) -> tuple[float, float]:
    """Of a layer on each stream: computation and transfers."""
    streams = ("compute", "communication")
    computed, moved = (sum(one.seconds for one in sections if one.stream == s) for s in streams)
    return computed, moved


def two_streams(schedule: Schedule) -> Result:
    """Two decoding steps of an R1-like model, of which the first layers are drawn."""
    costs = RooflineCosts(R1_LIKE, groups=32)
    given = synthetic(256 * 32, prompt=4000, output=1, handed_over=True)
    limits, deployment = Limits(256, 256, 2_000_000), Deployment(groups=32)
    return simulate(given, costs, schedule, limits=limits, deployment=deployment, detail=True)


def draw(path: Path, found: list[Comparison]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 3.6), layout="constrained")
    costs = small_host(QWEN_1_5B)
    ran = {name: decode(costs, one, output=12).timeline for name, one in SCHEDULES.items()}
    draw_timelines(ran, ("host", "device"), (2e-3, 7e-3), axes[0])
    axes[0].set_title("Steps of a 1.5B model (colours: even, odd)")
    dual = two_streams(DualStreams())
    start = dual.timeline.lanes["engine 0/compute"][0].begin
    window = start, start + 2.5e-3
    draw_timelines({"two streams": dual.timeline}, ("compute", "communication"), window, axes[1])
    axes[1].set_title("R1-like, 256 requests a group (colours: micro-batch)")
    _draw_gains(axes[2], [one for one in found if one.what.startswith("asynchronous")])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_gains(axes: Any, found: list[Comparison]) -> None:
    places = range(len(found))
    axes.bar([i - 0.2 for i in places], [one.reported for one in found], 0.4, label="xLLM, NPUs")
    simulated = [one.simulated for one in found]
    axes.bar([i + 0.2 for i in places], simulated, 0.4, label="simulated, H200")
    names = [one.what.rpartition(" ")[2] + (" (fitted)" if one.fitted else "") for one in found]
    axes.set(xticks=list(places), xticklabels=names, ylabel="% more tokens/s")
    axes.set_title("Planning a step ahead")
    axes.legend(fontsize=7)


def main(arguments: list[str]) -> None:
    console, found = Console(width=110), list(comparisons())
    console.print(comparison_table(found))
    console.print(schedule_table())
    console.print(stream_table())
    path = Path(arguments[0]) if arguments else PICTURE
    draw(path, found)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
