"""A trace as a picture: a line for each multiprocessor, items coloured by their role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from warploom.runtime.traces.run_times import RunTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"prefill": "#c2410c", "decode": "#1d4ed8", "single": "#0f766e"}
_INK = "#1f3b57"
_GAP = 0.15  # between two lines; the rest of a line is its CTAs', one below the other
_FEW = 64  # items of a line that edges still tell apart
_MOST_TICKS = 24

Floats = npt.NDArray[np.float64]


def paint(trace: RunTimes) -> Figure:
    """The picture, as a figure of matplotlib without a window."""
    from matplotlib.figure import Figure

    lanes, _ = trace.lanes
    sms = np.unique(lanes[:, 0])
    figure = Figure(figsize=(10, 2.2 + min(10.0, 0.24 * len(sms))), layout="constrained")
    axes = figure.subplots()
    draw(axes, trace)
    shown = np.arange(0, len(sms), max(1, -(-len(sms) // _MOST_TICKS)))
    axes.set_yticks(shown + 0.5, [str(sm) for sm in sms[shown]])
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="microseconds since the first item began", ylabel=trace.place)
    axes.set_title(f"{trace.kernel} on {trace.device}", fontsize=9, loc="left")
    if len(trace.items):
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw(axes: Axes, trace: RunTimes) -> None:
    """Its items and its predicted end, in axes of the caller's, which get no titles."""
    lanes, _ = trace.lanes
    top, height = places(lanes)
    _draw_items(axes, trace, top, height)
    _draw_prediction(axes, trace)
    axes.set_xlim(0, 1.02 * max(trace.span_us, trace.predicted.us) or 1.0)
    axes.set_ylim(max(1, len(np.unique(lanes[:, 0]))), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def places(lanes: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Where lanes lie: those of a multiprocessor share the line of its rank.

    Args:
        lanes: (lanes, 2) multiprocessor and CTA, in order.

    Returns:
        (lanes,) upper end of each, with lines at 0, 1, ...; and its height.
    """
    _, first, line, count = np.unique(
        lanes[:, 0], return_index=True, return_inverse=True, return_counts=True
    )
    line = line.reshape(-1)
    height = (1 - _GAP) / count[line]
    return line + _GAP / 2 + (np.arange(len(lanes)) - first[line]) * height, height


def _draw_items(axes: Axes, trace: RunTimes, top: Floats, height: Floats) -> None:
    from matplotlib.collections import PolyCollection

    items, (lanes, lane) = trace.items, trace.lanes
    width = 0.4 if len(items) <= _FEW * len(lanes) else 0.0
    for one in trace.roles():
        mine = items["role"] == one.role
        left, right = items["begin_us"][mine], items["end_us"][mine]
        upper = top[lane[mine]]
        lower = upper + height[lane[mine]]
        corners = np.stack((left, upper, right, upper, right, lower, left, lower), axis=1)
        label = f"{one.role}: {one.items} items, {one.busy_us:,.0f} us in all"
        axes.add_collection(
            PolyCollection(
                list(corners.reshape(-1, 4, 2)),
                facecolors=COLORS[one.role],
                edgecolors="white",
                linewidths=width,
                label=label,
            )
        )


def _draw_prediction(axes: Axes, trace: RunTimes) -> None:
    label = f"predicted end {trace.predicted.us:,.1f} us, {trace.predicted.by}"
    axes.axvline(trace.predicted.us, color=_INK, linestyle="--", linewidth=1.2, label=label)
