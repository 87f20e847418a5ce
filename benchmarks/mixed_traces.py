"""Where the time of mixed batches goes: a trace of each, as a row, a picture and Perfetto's JSON.

    python benchmarks/mixed_traces.py [--cases "1k/8k/32,2k/8k/64"] [--drawn N,M] [--pictures]
                                      [--out FOLDER] [--device cpu]

All are drawn on one sheet, a panel each; `--pictures` makes a picture of each, too.

One launch of two roles by kernels that note when each work item begins and ends, after as many runs
as warm a GPU up. Such kernels are slower, so rows tell shares and no speeds: when CTAs of each kind
end on average and at last, and which part of the time SMs have an item.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import mixed_ours
import numpy as np
import numpy.typing as npt
import torch
from batches import Inputs
from harness import placed
from machine import machine_facts
from mixed_batches import KINDS, Batch, drawn_batch, make_mixed, table_batches, tiny
from peers import planned
from rich.console import Console
from rich.progress import track
from rich.table import Table

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.runtime.traces.picture import COLORS, draw
from warploom.runtime.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_SECONDS = 0.3
SHEET_COLUMNS, SHEET_DPI = 3, 200
SHEET_TITLE = "Microseconds since the first item began, a line for each SM; dashed: as predicted"
ON_CPU = TileConfig(48, 128, decode=TileConfig(12, 64))


@dataclass(frozen=True)
class Ends:
    """When CTAs of one kind have done their last item, in microseconds.

    Attributes:
        ctas: how many there are.
        mean, last: of the ends.
    """

    ctas: int
    mean: float
    last: float


@dataclass(frozen=True)
class TraceRow:
    """One traced launch.

    Attributes:
        case: its batch.
        span_us: from the begin of the first item to the end of the last.
        predicted_us: the end that the plan's prices predict.
        busy: part of the span in which an SM has an item, on average.
        decoding: CTAs that had decodes; their ends count the prefills that they claimed.
        decodes: the same CTAs, without these.
        prefilling: CTAs that had none.
    """

    case: str
    span_us: float
    predicted_us: float
    busy: float
    decoding: Ends
    decodes: Ends
    prefilling: Ends


def ends(of_ctas: npt.NDArray[np.float64]) -> Ends:
    if not len(of_ctas):
        return Ends(0, 0.0, 0.0)
    return Ends(len(of_ctas), round(float(np.mean(of_ctas)), 1), round(float(of_ctas.max()), 1))


def row_of(case: str, trace: Trace) -> TraceRow:
    """What a trace says of both roles."""
    items, (lanes, lane) = trace.items, trace.lanes
    decode = items["role"] == "decode"
    last, last_decode = np.zeros(len(lanes)), np.zeros(len(lanes))
    np.maximum.at(last, lane, items["end_us"])
    np.maximum.at(last_decode, lane[decode], items["end_us"][decode])
    decoding = last_decode > 0
    return TraceRow(
        case, round(trace.span_us, 1), round(trace.predicted.us, 1),
        round(float(np.mean(list(trace.busy().values()))), 3),
        ends(last[decoding]), ends(last_decode[decoding]), ends(last[~decoding]),
    )  # fmt: skip


def warm_up(run: Callable[[], object], device: torch.device) -> None:
    """Runs until clocks have settled; once on a CPU."""
    run()
    if device.type != "cuda":
        return
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        for _ in range(20):
            run()
        torch.cuda.synchronize(device)


def two_roles(batch: Batch, inputs: Inputs) -> wl.AttentionWrapper:
    kind = KINDS[batch.kind]
    if inputs.q.device.type == "cuda":
        return mixed_ours.with_roles(kind, inputs)
    return planned(kind.variant(), inputs, tile=ON_CPU)


def traced(batch: Batch, device: torch.device) -> Trace:
    """The trace of a launch of two roles, after others."""
    torch.manual_seed(0)
    whole = make_mixed(batch, device).whole
    with patch.dict(os.environ, WARPLOOM_TRACE="1"):  # read when a wrapper is made
        attention = two_roles(batch, whole)
    warm_up(lambda: attention.run(whole.q, (whole.k, whole.v)), device)
    return wl.trace(attention)


def file_name(case: str) -> str:
    return "trace-" + "".join(letter if letter.isalnum() else "-" for letter in case)


def table_of(rows: Sequence[TraceRow]) -> Table:
    table = Table("", "us", "predicted", "busy", "decoding CTAs", "end of decodes, last",
                  "of their prefills", "prefilling CTAs", "end, last")  # fmt: skip
    for row in rows:
        both = (f"{one.mean:.0f}, {one.last:.0f}"
                for one in (row.decodes, row.decoding, row.prefilling))  # fmt: skip
        decodes, own, others = both
        table.add_row(
            row.case, f"{row.span_us:.0f}", f"{row.predicted_us:.0f}", f"{row.busy:.0%}",
            str(row.decoding.ctas), decodes, own, str(row.prefilling.ctas), others,
        )  # fmt: skip
    return table


def sheet(traces: Mapping[str, Trace]) -> Figure:
    """All of them, a panel each: a line is a multiprocessor, a dashed one the predicted end."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lines = -(-len(traces) // SHEET_COLUMNS)
    figure = Figure(figsize=(12, 0.6 + 3.0 * lines), layout="constrained")
    panels = list(figure.subplots(lines, SHEET_COLUMNS, squeeze=False).flat)
    for axes, (name, trace) in zip(panels, traces.items(), strict=False):
        draw(axes, trace)
        for items in axes.collections:  # lines are three pixels high: no edges, nothing blurred
            items.set(linewidth=0, antialiased=False)
        busy = float(np.mean(list(trace.busy().values())))
        axes.set_title(f"{name}: {trace.span_us:.0f} us, busy {busy:.0%}", fontsize=8, loc="left")
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    for axes in panels[len(traces) :]:
        axes.set_visible(False)
    handles = [Patch(color=COLORS[role], label=role) for role in ("prefill", "decode")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(SHEET_TITLE, fontsize=9, x=0.01, ha="left")
    return figure


def batches_of(cases: str, drawn: str, small: bool) -> list[Batch]:
    wanted = [name.strip() for name in cases.split(",") if name.strip()]
    found = [batch for batch in table_batches() if not wanted or batch.name in wanted]
    found += [drawn_batch(int(number)) for number in drawn.split(",") if number.strip()]
    return [tiny(batch) for batch in found] if small else found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="names of the table's, by commas; else all")
    parser.add_argument("--drawn", default="", help="numbers of drawn batches, by commas")
    parser.add_argument("--pictures", action="store_true", help="a picture and a JSON of each")
    options = placed(parser, argv)
    device, folder = options.device, Path(options.out)
    console, rows, traces = Console(), [], {}
    batches = batches_of(options.cases, options.drawn, device.type != "cuda")
    for batch in track(batches, "tracing", console=console):
        found = traced(batch, device)
        rows.append(row_of(batch.name, found))
        traces[batch.name] = found
        if options.pictures:
            name = folder / file_name(batch.name)
            found.save(name.with_suffix(".png"))
            found.save(name.with_suffix(".json"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"benchmark": "mixed_traces", "machine": machine_facts(device)}, *map(asdict, rows)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "mixed_traces.jsonl").write_text(text)
    sheet(traces).savefig(folder / "mixed_traces.png", dpi=SHEET_DPI)
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
