"""What mixed batches should gain, and whether recorded rows show it.

A speed-up is the fastest serial way of the same run divided by one plan. Serial ways are those of
peers, and warploom's two wrappers in turn: a user has both. A missing row makes no verdict. What
does both halves at once, fused kernels of peers and two streams, is told beside it; it counts in
the goals of drawn batches that were run beside all peers. `plot.py` writes the verdicts into
docs/figures.md; run by itself this file prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness import Row, pivot

ONE_PLAN, ONE_TILE, OWN_SERIAL = "one plan", "one tile", "two in turn"
TWO_STREAMS = "two streams"
TWO_ROLES, PORTABLE_TILE = "two roles", "portable tile"
PREFILL_ALONE, DECODE_ALONE = "prefill alone", "decode alone"
# what a user of one plan has by that, and what computes no whole batch
NO_RIVALS = {ONE_PLAN, ONE_TILE, TWO_ROLES, PORTABLE_TILE, PREFILL_ALONE, DECODE_ALONE}
SERIAL = "serial"  # how rows of peers end that run two kernels in turn
FLASH3 = "FlashAttention-3"
PEERS = (FLASH3, "FlashInfer")  # how their rows begin

# (chunk, context) -> decodes -> speed-up
OF_CASES = {
    (1024, 8192): {32: 1.40, 64: 1.25, 128: 1.12},
    (2048, 8192): {32: 1.35, 64: 1.35, 128: 1.15},
}
OTHERS, LOPSIDED = 1.25, 1.03  # the latter where one side has most of the time
MOST_OF_TIME = 0.75
DRAWN_MEAN, DRAWN_LEAST = 1.20, 0.98
PURE_LOSS = 0.01
PLAN_US = 40.0


@dataclass(frozen=True)
class Verdict:
    """One batch. Times are in milliseconds; None where a row has no figure.

    Attributes:
        case: its row.
        ours: one plan.
        peers: the fastest serial way of a peer, and its row's name.
        own: two wrappers in turn.
        rival: the fastest of all other ways, serial or not, and its row's name.
        alone: prefill and decode, each alone.
        goal: the speed-up asked for; None if it cannot be told.
        plan_us: host time of a plan.
    """

    case: str
    ours: float | None
    peers: tuple[float, str] | None
    own: float | None
    rival: tuple[float, str] | None
    alone: tuple[float, float] | None
    goal: float | None
    plan_us: float | None

    @property
    def serial(self) -> tuple[float, str] | None:
        """The fastest serial way, and its row's name."""
        own = None if self.own is None else (self.own, OWN_SERIAL)
        return min((one for one in (self.peers, own) if one is not None), default=None)

    @property
    def speed_up(self) -> float | None:
        return self.over(self.ours)

    @property
    def over_peers(self) -> float | None:
        return None if self.peers is None or self.ours is None else self.peers[0] / self.ours

    @property
    def over_all(self) -> float | None:
        return None if self.rival is None or self.ours is None else self.rival[0] / self.ours

    @property
    def limit(self) -> float | None:
        """The speed-up of the longer half alone."""
        return self.over(None if self.alone is None else max(self.alone))

    def over(self, ms: float | None) -> float | None:
        return None if self.serial is None or ms is None else self.serial[0] / ms

    @property
    def met(self) -> bool | None:
        if self.speed_up is None or self.goal is None:
            return None
        return self.speed_up >= self.goal


def goal_of(
    chunk: int, context: int, decodes: int, alone: tuple[float, float] | None
) -> float | None:
    """Of a case of the table; some depend on which part of the time the longer half has."""
    if named := OF_CASES.get((chunk, context), {}).get(decodes):
        return named
    if alone is None:
        return None
    return OTHERS if max(alone) <= MOST_OF_TIME * sum(alone) else LOPSIDED


def verdicts(rows: Sequence[Row], drawn: bool = False) -> list[Verdict]:
    """One for each case; of drawn batches each has the same goal."""
    cases, impls, at = pivot(rows)
    found = []
    for case in cases:
        ms = {impl: row.ms for impl in impls if (row := at.get((case, impl))) and row.value}
        times = {impl: time for impl, time in ms.items() if time is not None}
        peers = [(time, impl) for impl, time in times.items() if impl.endswith(SERIAL)]
        rivals = [(time, impl) for impl, time in times.items() if impl not in NO_RIVALS]
        halves = [times.get(half) for half in (PREFILL_ALONE, DECODE_ALONE)]
        alone = None if halves[0] is None or halves[1] is None else (halves[0], halves[1])
        params = next(row.params for row in rows if row.case == case)
        size = params["chunk"], params["context"], params["decodes"]
        one_plan = at.get((case, ONE_PLAN))
        found.append(
            Verdict(
                case, times.get(ONE_PLAN), min(peers, default=None), times.get(OWN_SERIAL),
                min(rivals, default=None), alone,
                DRAWN_LEAST if drawn else goal_of(*size, alone),
                one_plan.params.get("plan_us") if one_plan else None,
            )
        )  # fmt: skip
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# --- as text --------------------------------------------------------------------------------------


def shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def answer(met: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[met]


HEADINGS = ("", "one plan, us", "fastest serial, us", "which", "speed-up", "over peers",
            "over all", "which", "limit", "goal", "met", "plan, us")  # fmt: skip


def cells(one: Verdict) -> list[str]:
    time, name = one.serial if one.serial else (None, "")
    ours, serial = (None if ms is None else ms * 1e3 for ms in (one.ours, time))
    return [
        one.case, shown(ours, 0), shown(serial, 0), name, shown(one.speed_up),
        shown(one.over_peers), shown(one.over_all), one.rival[1] if one.rival else "",
        shown(one.limit), shown(one.goal), answer(one.met), shown(one.plan_us, 0),
    ]  # fmt: skip


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    table = [headings, ["---"] + ["---:"] * (len(headings) - 1), *lines]
    return ["| " + " | ".join(line) + " |" for line in table]


def of_plans(found: Sequence[Verdict]) -> list[str]:
    times = [one.plan_us for one in found if one.plan_us is not None]
    if not times:
        return []
    met = answer(max(times) <= PLAN_US)
    return [f"Planning takes at most {max(times):.0f} us of the host (goal {PLAN_US:.0f}: {met})."]


def of_table(rows: Sequence[Row]) -> list[str]:
    """Speed-ups and goals of the twelve, as lines of Markdown."""
    found = verdicts(rows)
    judged = [one.met for one in found if one.met is not None]
    lines = [
        "Speed-up: the fastest serial way of the run over one plan; over all: of two at once, too; "
        "limit: of the longer half alone.", "",
        *markdown_table(HEADINGS, [cells(one) for one in found]), "",
    ]  # fmt: skip
    beyond = [one.over_all >= one.goal for one in found if one.over_all and one.goal]
    if judged:
        lines.append(
            f"{sum(judged)} of {len(judged)} goals are met; beside what does both at once, too, "
            f"{sum(beyond)} of {len(beyond)} would be."
        )
    return [*lines, *of_plans(found), ""]


def of_drawn(rows: Sequence[Row]) -> list[str]:
    """The mean of drawn batches, and the slowest."""
    found = verdicts(rows, drawn=True)
    known = sorted((one.speed_up, one.case) for one in found if one.speed_up is not None)
    lines = ["", *markdown_table(HEADINGS, [cells(one) for one in found]), ""]
    if known:
        mean, (least, case) = geometric_mean([speed_up for speed_up, _ in known]), known[0]
        lines.append(
            f"Geometric mean of {len(known)}: {mean:.2f} (goal {DRAWN_MEAN:.2f}: "
            f"{answer(mean >= DRAWN_MEAN)}); least {least:.2f}, {case} (goal {DRAWN_LEAST:.2f}: "
            f"{answer(least >= DRAWN_LEAST)})."
        )
    return [*lines, *of_plans(found), ""]


def of_pure(rows: Sequence[Row]) -> list[str]:
    """What pure batches lose through a wrapper that may choose roles."""
    cases, _, at = pivot(rows)
    losses = {
        case: ours.ms / plain.ms - 1
        for case in cases
        if (ours := at.get((case, ONE_PLAN))) and (plain := at.get((case, ONE_TILE)))
        and ours.ms and plain.ms
    }  # fmt: skip
    lines = [
        [case, f"{loss:+.1%}", answer(loss <= PURE_LOSS)] for case, loss in losses.items()
    ]  # fmt: skip
    goal = f"at most {PURE_LOSS:.0%}"
    return ["", *markdown_table(("", "longer than one tile", goal), lines), ""] if lines else []


def of_own(rows: Sequence[Row]) -> list[str]:
    """How many times as fast one plan is as other ways of warploom; no goals.

    Means are of all cases with as many lanes.
    """
    cases, impls, _ = pivot(rows)
    others = [way for way in (OWN_SERIAL, TWO_STREAMS, ONE_TILE, PORTABLE_TILE) if way in impls]
    gains = {way: gains_over([way], rows) for way in others}
    lines = [[case, *(shown(gains[way].get(case)) for way in others)] for case in cases]
    lanes = {row.case: int(row.params["head_dim"]) for row in rows if "head_dim" in row.params}
    for dim in dict.fromkeys(lanes[case] for case in cases if case in lanes):
        known = [[x for case, x in gains[way].items() if lanes[case] == dim] for way in others]
        means = [shown(geometric_mean(x), 3) if x else "" for x in known]
        lines.append([f"geometric mean, {dim} lanes", *means])
    headings = ("times of others over that of one plan", *others)
    return ["", *markdown_table(headings, lines), ""] if others else []


def gains_over(ways: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
    """How many times as fast one plan is as the fastest of these ways, by case."""
    cases, _, at = pivot(rows)
    return {
        case: min(times) / ours.ms
        for case in cases
        if (ours := at.get((case, ONE_PLAN))) and ours.ms
        and (times := [r.ms for way in ways if (r := at.get((case, way))) and r.value and r.ms])
    }  # fmt: skip


def of_peers(rows: Sequence[Row]) -> list[str]:
    """How many times as fast one plan is as each way, and as the faster of some.

    Goals of drawn batches are held against the fastest of all ways, our own two streams among them.
    """
    _, impls, _ = pivot(rows)
    peers = tuple(impl for impl in impls if impl.startswith(PEERS))
    others = {impl: (impl,) for impl in impls if impl != ONE_PLAN}
    others |= {"the better of FlashAttention-3's": tuple(n for n in peers if n.startswith(FLASH3))}
    others |= {"the better POD of FlashInfer's": tuple(n for n in peers if n.endswith("POD"))}
    others |= {"the fastest of these peers": peers}
    others |= {"two in turn, or the fastest peer": (OWN_SERIAL, *peers)}
    others |= {"the fastest of all": (OWN_SERIAL, TWO_STREAMS, *peers)}
    lines = []
    for name, ways in others.items():
        if gains := sorted(gains_over(ways, rows).values()):
            figures = geometric_mean(gains), gains[0], gains[-1]
            lines.append([name, str(len(gains)), *(shown(one, 3) for one in figures)])
    table = markdown_table(("one plan over", "batches", "mean", "least", "most"), lines)
    return ["", *table, "", *of_all(gains_over(others["the fastest of all"], rows)), ""]


def of_all(gains: dict[str, float]) -> list[str]:
    """The goals of drawn batches, and the batches that miss the one of each."""
    if not gains:
        return []
    mean = geometric_mean(list(gains.values()))
    short = sorted((gain, case) for case, gain in gains.items() if gain < DRAWN_LEAST)
    named = "; ".join(f"{case} ({shown(gain, 3)})" for gain, case in short)
    return [
        f"Beside the fastest of all: geometric mean {mean:.3f} (goal {DRAWN_MEAN:.2f}: "
        f"{answer(mean >= DRAWN_MEAN)}); {len(short)} below {DRAWN_LEAST:.2f} (goal: none)"
        + (f": {named}." if short else ".")
    ]


SUMMARIES = {
    "mixed": of_table,
    "mixed_drawn": of_drawn,
    "mixed_drawn_peers": of_peers,
    "mixed_pure": of_pure,
    "mixed_light": of_own,
    "mixed_lanes": of_own,
    "mixed_fp8": of_own,
    "mixed_captured": of_own,
}
