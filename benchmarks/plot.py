"""Recorded figures as pictures and tables: nothing here is measured or typed in.

    python benchmarks/plot.py [FOLDER]     reads FOLDER/*.jsonl (default benchmarks/results)

Writes a PNG next to each file that has a drawing, and pictures and tables between BEGIN and END in
docs/figures.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import mixed_goals
from harness import RESULTS, Row, cell, load_rows, pivot
from titles import TITLES

FIGURES = RESULTS.parents[1] / "docs" / "figures.md"
# for choosing by and not for reading, and what was run a second time
NOT_SHOWN = (
    "tile_sweep*",
    "composed_tiles",
    "spills",
    "role_*",
    "mixed*_h100",
    "mixed*_again",
    "mixed_beside",
    "mixed_traces",
    "mixed_lanes_slower",
    "mixed_fused",
    "prefetch*",
    "graph_pool_h100",
)
# Sums and copies of torch are no bound: a kernel with another pattern of reads may pass them.
SCALE = "Dashed: what torch's own kernels reached in the same run; a scale, no bound."
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
# One colour for a library in all pictures; what one library does in several ways has shades of it.
LIBRARIES = {
    "warploom": "#c2410c",
    "single format": "#c2410c",  # warploom's, too
    "cuDNN": "#1d4ed8",
    "FlexAttention": "#0f766e",
    "FlashInfer": "#7c3aed",
    "FlashAttention-3": "#be185d",
    "FlashAttention-2": "#f472b6",
}
# Ways of warploom alone, where these are compared with each other: colours that no library has.
WAYS = {
    "turned": "#d55e00",
    "group": "#0072b2",
    "consumers": "#009e73",
    "fused": "#56b4e9",
    "before": "#cc79a7",
    "stored": "#e69f00",
    "plain": "#1e293b",
    "one plan": "#c2410c",
    "one tile": "#0072b2",
    "two in turn": "#eab308",
    "two streams": "#65a30d",
    "prefill alone": "#94a3b8",
    "decode alone": "#cbd5e1",
    "no attention": "#cbd5e1",
    "paged": "#94a3b8",
    "ragged": "#475569",
    "virtual": "#0072b2",
    "virtual, as pages": "#56b4e9",
    "virtual, by token": "#e69f00",
    "virtual, mapped by grow": "#d55e00",
    "virtual, mapped ahead": "#e69f00",
    "virtual, taken over": "#0072b2",
    "own next request": "#0072b2",
    "free pages": "#e69f00",
    "another model's request": "#d55e00",
    "a copy of as many bytes": "#94a3b8",
    "one stream": "#1e293b",
    "two streams, sm_limit": "#0072b2",
    "serial": "#1e293b",
    "ahead": "#d55e00",
    "serial + device planner": "#64748b",
    "ahead + device planner": "#e69f00",
}
OTHERS = "#64748b"
_LIGHTER = 0.38  # of the way to white, for each further way of one library
_LIGHTEST = 0.75  # for the last of them, if they are many


def by_unit(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each unit that cases are measured in, with the ceilings in it."""
    units = dict.fromkeys(row.unit for row in rows if row.case != "ceiling")
    return [[row for row in rows if row.unit == unit] for unit in units]


def ceilings_of(rows: Sequence[Row]) -> list[Row]:
    """Ceilings among the rows of one unit."""
    return [row for row in rows if row.case == "ceiling" and row.value]


def color_of(impl: str, impls: Sequence[str]) -> tuple[float, float, float]:
    """The colour of the library; the lighter, the later this way of it stands in the list."""
    base = base_color(impl)
    ways = [name for name in impls if base_color(name) == base]
    step = min(_LIGHTER, _LIGHTEST / max(1, len(ways) - 1))
    kept = 1 - step * ways.index(impl)
    red, green, blue = (1 - kept * (1 - int(base[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue


def base_color(impl: str) -> str:
    if impl in WAYS:
        return WAYS[impl]
    return next((color for name, color in LIBRARIES.items() if impl.startswith(name)), OTHERS)


def draw_lines(axes: Any, rows: Sequence[Row]) -> None:
    """One line for each implementation over the cases, which lie in growing order."""
    cases, impls, at = pivot(rows)
    last = {impl: row.value for impl in impls if (row := at.get((cases[-1], impl))) and row.value}
    # the legend lists lines as they lie at the right end
    for impl in sorted(impls, key=lambda name: -(last.get(name) or 0.0)):
        points = [
            (x, row.value)
            for x, case in enumerate(cases)
            if (row := at.get((case, impl))) and row.value is not None
        ]
        if points:
            width = 2.6 if impl == "warploom" else 1.4
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                linewidth=width,
                color=color_of(impl, impls),
                label=impl,
            )
    axes.set_xticks(range(len(cases)), cases)


def draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    """A group of bars for each case."""
    cases, impls, at = pivot(rows)
    shown = [i for i in impls if any((r := at.get((c, i))) and r.value for c in cases)]
    width = 0.8 / max(1, len(shown))
    for place, impl in enumerate(shown):
        found = [at.get((case, impl)) for case in cases]
        values = [row.value if row and row.value is not None else 0.0 for row in found]
        left = [x + (place - (len(shown) - 1) / 2) * width for x in range(len(cases))]
        axes.bar(left, values, width * 0.92, color=color_of(impl, impls), label=impl)
    crowded = max(map(len, cases), default=0) * len(cases) > 60
    turned = {"rotation": 30, "ha": "right", "fontsize": 8} if crowded else {}
    axes.set_xticks(range(len(cases)), cases, **turned)


def draw_log_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bars of times that lie a factor of a hundred apart."""
    draw_bars(axes, rows)
    axes.set_yscale("log")


def draw_beside_simulated(axes: Any, rows: Sequence[Row]) -> None:
    """Bars of measured steps, with a diamond where `params` say what was simulated."""
    draw_bars(axes, rows)
    cases, _, at = pivot(rows)
    for group in axes.containers:
        for case, bar in zip(cases, group, strict=True):
            row = at.get((case, group.get_label()))
            if row and (simulated := row.params.get("simulated_ms")) is not None:
                middle = bar.get_x() + bar.get_width() / 2
                axes.plot(middle, simulated, "D", color="white", markeredgecolor="black", ms=5)
    axes.plot([], [], "D", color="white", markeredgecolor="black", ms=5, label="simulated")


def draw_speed_ups(axes: Any, rows: Sequence[Row]) -> None:
    """One bar for each drawn batch, the smallest first, over lines of 1 and of the goals."""
    found = mixed_goals.verdicts(rows, drawn=True)
    gains = sorted(one.speed_up for one in found if one.speed_up is not None)
    axes.bar(range(len(gains)), gains, color=LIBRARIES["warploom"], label="one plan")
    for height in (1.0, mixed_goals.DRAWN_LEAST, mixed_goals.DRAWN_MEAN):
        axes.axhline(height, color="black", linestyle="--" if height != 1.0 else "-", linewidth=0.8)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(gains)} batches; dashed: goals of the least and of the geometric mean")
    axes.set_ylabel("fastest serial way over one plan, higher is better")


def draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Times of each rival over those of one plan: a line for each, the least ratio first."""
    cases, impls, _ = pivot(rows)
    own = mixed_goals.ONE_PLAN, mixed_goals.TWO_ROLES  # which one plan may be
    rivals = [impl for impl in impls if impl not in own]
    for impl in rivals:
        ratios = sorted(mixed_goals.gains_over([impl], rows).values())
        axes.plot(range(len(ratios)), ratios, color=color_of(impl, impls), label=impl)
    if len(rivals) > 1:
        best, label = sorted(mixed_goals.gains_over(rivals, rows).values()), "the fastest of all"
        axes.plot(range(len(best)), best, color="black", linewidth=2, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0.9, 2.5)  # single calls of peers take many times as long
    axes.set_xlabel(f"{len(cases)} batches, sorted for each line; some run fewer")
    axes.set_ylabel("time over that of one plan, higher is better for it")


# in the order of the pages
DRAWINGS: dict[str, Callable[[Any, Sequence[Row]], None]] = {
    "prefill": draw_lines,
    "prefill_frontend": draw_lines,
    "prefill_flash3": draw_lines,
    "prefill_full": draw_bars,
    "prefill_variants": draw_bars,
    "prefill_own": draw_bars,
    "prefill_rope": draw_bars,
    "prefill_ragged": draw_bars,
    "prefill_paged": draw_bars,
    "prefill_chunks": draw_bars,
    "prefill_split": draw_bars,
    "prefill_fp8": draw_bars,
    "decode": draw_bars,
    "decode_page1": draw_bars,
    "decode_long": draw_bars,
    "decode_selections": draw_bars,
    "decode_balance": draw_bars,
    "decode_fp8": draw_bars,
    "decode_step": draw_bars,
    "mixed": draw_bars,
    "mixed_flash3": draw_bars,
    "mixed_flash3_h200": draw_bars,
    "mixed_drawn": draw_speed_ups,
    "mixed_drawn_peers": draw_ratios,
    "mixed_light": draw_ratios,
    "mixed_lanes": draw_ratios,
    "mixed_pure": draw_bars,
    "mixed_fp8": draw_bars,
    "mixed_captured": draw_ratios,
    "append": draw_bars,
    "shared_prefix": draw_bars,
    "shared_mixed": draw_bars,
    "key_transforms": draw_bars,
    "virtual_growth": draw_log_bars,
    "virtual_growth_cpu": draw_log_bars,
    "virtual_attention": draw_bars,
    "virtual_attention_cpu": draw_bars,
    "virtual_handover": draw_log_bars,
    "virtual_handover_cpu": draw_log_bars,
    "async_schedule": draw_beside_simulated,
    "dual_streams": draw_beside_simulated,
    "beams_attention": draw_log_bars,
    "beams_top_k": draw_log_bars,
    "beams_host": draw_log_bars,
    "transformers_generation": draw_bars,
    "llama_step": draw_bars,
    "context_parallel_2": draw_log_bars,
    "context_parallel_4": draw_log_bars,
    "tensor_parallel_2": draw_bars,
    "tensor_parallel_4": draw_bars,
}


def draw_ceilings(axes: Any, rows: Sequence[Row]) -> None:
    """A dashed line for each."""
    for line in ceilings_of(rows):
        height = line.value or 0.0
        axes.axhline(height, color="black", linestyle="--", linewidth=1, zorder=0)
        axes.annotate(
            f"torch, {line.impl}",
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
        axes.set_ylim(0, max(axes.get_ylim()[1], height * 1.1))


def draw(benchmark: str, machine: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """One picture; each unit has axes of its own, one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = by_unit(rows)
    bars = max(len(cases) * len(impls) for cases, impls, _ in map(pivot, parts))
    size = min(max(8.0, 0.11 * bars + 3.0), 14.0), 4.6 * len(parts)
    figure, grid = plt.subplots(len(parts), figsize=size, layout="constrained", squeeze=False)
    for axes, part in zip(grid.flat, parts, strict=True):
        axes.set_ylabel(f"{part[-1].unit}, {better(part[-1].unit)} is better")
        DRAWINGS[benchmark](axes, part)
        draw_ceilings(axes, part)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.4))
    if any(map(ceilings_of, parts)):
        figure.supxlabel(SCALE, fontsize=7, x=0.01, ha="left")
    title = f"{TITLES[benchmark]}\n{machine['device']}, torch {machine['torch']}"
    grid.flat[0].set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def better(unit: str) -> str:
    return "higher" if unit.endswith("/s") else "lower"


def markdown(benchmark: str, machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """A table for each unit, and the machine."""
    parts = by_unit(rows)
    tables = [line for part in parts for line in table(benchmark, part)]
    if summary := mixed_goals.SUMMARIES.get(benchmark):
        tables += summary(rows)
    shown = {row.unit for part in parts for row in part}
    if rates := [row for row in ceilings_of(rows) if row.unit not in shown]:
        told = ", ".join(f"{row.impl} {row.value:.0f} {row.unit}" for row in rates)
        tables += [f"In the same run: {told}.", ""]
    facts = ", ".join(f"{key} {machine[key]}" for key in ("device", "torch", "date", "commit"))
    return "\n".join([*tables, f"<sub>{facts}</sub>", ""])


def table(benchmark: str, rows: Sequence[Row]) -> list[str]:
    """Title, table, and one line for each figure that is missing; rows have one unit."""
    cases, impls, at = pivot(rows)
    limits = ", ".join(f"{row.value:.0f} ({row.impl})" for row in ceilings_of(rows))
    limit = f" For scale: {limits}." if limits else ""
    unit = rows[-1].unit
    lines = [
        f"**{TITLES.get(benchmark, benchmark)}**: {unit}, {better(unit)} is better.{limit}",
        "",
        "| | " + " | ".join(impls) + " |",
        "| --- |" + " ---: |" * len(impls),
    ]
    lines += [
        f"| {case} | " + " | ".join(cell(at.get((case, impl))) for impl in impls) + " |"
        for case in cases
    ]
    notes = {(row.impl, row.note): None for row in rows if row.note}
    lines += ["", *(f"- {impl}: {note.replace('|', '/')}" for impl, note in notes)] * bool(notes)
    return [*lines, ""]


def picture(benchmark: str) -> str:
    """Of a recorded benchmark, for a page in docs/."""
    return f"![{TITLES[benchmark]}](../benchmarks/results/{benchmark}.png)\n"


def without_rates(records: dict[str, tuple[dict[str, Any], list[Row]]]) -> str:
    """A line that names benchmarks of a GPU whose runs did not measure how fast it was."""
    missing: dict[str, list[str]] = {}
    for name, (machine, rows) in records.items():
        known = {row.impl.split()[0] for row in ceilings_of(rows)}
        if machine["device"].startswith("NVIDIA") and (lacks := {"matmul", "copy"} - known):
            missing.setdefault(" and ".join(sorted(lacks)), []).append(f"`{name}`")
    told = "; ".join(f"{rates}: {', '.join(names)}" for rates, names in missing.items())
    return f"Run without a rate, by the names of records: {told}.\n" if told else ""


def section(parts: Sequence[str]) -> str:
    body = "\n".join(parts) or "No figures are recorded yet; `make bench` on a GPU records them.\n"
    return f"{BEGIN}\n\n{body}\n{END}"


def replace_section(text: str, section: str) -> str:
    """Put the section between the markers; a page without markers is an error."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return before + section + after


def order(path: Path) -> tuple[int, str]:
    """Benchmarks with a drawing first, as listed there; then the others by name."""
    drawn = list(DRAWINGS)
    return (drawn.index(path.stem) if path.stem in drawn else len(drawn), path.stem)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    folder = Path(given[0]) if given else RESULTS
    parts, shown = [], {}
    for path in sorted(folder.glob("*.jsonl"), key=order):
        if any(fnmatch(path.stem, pattern) for pattern in NOT_SHOWN):
            continue
        machine, rows = load_rows(path)
        if all(row.case == "ceiling" for row in rows):  # a run that ended before its first figure
            continue
        if path.stem in DRAWINGS:
            parts.append(picture(path.stem))
            try:
                draw(path.stem, machine, rows, path.with_suffix(".png"))
                print(path.with_suffix(".png"))
            except ModuleNotFoundError as missing:
                print(f"no picture of {path.stem}: {missing}; install matplotlib")
        parts.append(markdown(path.stem, machine, rows))
        shown[path.stem] = machine, rows
    parts.insert(0, without_rates(shown))
    if folder == RESULTS and FIGURES.exists():
        FIGURES.write_text(replace_section(FIGURES.read_text(), section(parts)))
    else:
        print("\n".join(parts))


if __name__ == "__main__":
    main()
