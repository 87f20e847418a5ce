"""What two roles take by how many CTAs prefill, and whether the prices choose well among these.

    python benchmarks/role_splits.py [--drawn N] [--limit SECONDS] [--quick] [--out FOLDER]
    python benchmarks/role_splits.py --fit [FILE]

Each batch is planned with the split that the prices choose ("chosen") and with others, by prices
that have no other effect, and its launches are timed by turns, so that a clock that falls is every
split's. `--fit` needs no GPU: it tells how much longer than the best split of each batch the prices
take that ship, and those of a grid that do best, and where either is worst.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import mixed_ours
import numpy as np
import torch
from fit_roles import CTAS, counted, priced, segments_of
from harness import Report, Row, file_to_fit, load_rows, report_with_ceilings
from harness import placed as placed_arguments
from mixed_batches import (
    KINDS,
    Batch,
    Mixed,
    drawn_batch,
    drawn_batches,
    make_mixed,
    table_batches,
)
from mixed_goals import geometric_mean
from peers import planned
from rich.console import Console
from rich.progress import track
from rich.table import Table

import warploom as wl
from warploom.codegen.choice.role_cost import RoleCost
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.planning.rules import Rules, roles_of_tile
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.model.roles import Role, RolePrices
from warploom.scheduler.model.tiles import query_tiles

NAME = "role_splits"
CHOSEN = "chosen"
OTHERS = (-40, -28, -20, -14, -8, -4, 4, 8, 14)  # CTAs that prefill, beside those that are chosen
LEAST = 4
ROUND_MS = 6.0
ROUNDS = 5


@contextmanager
def forced(prefill: int, batch: Batch) -> Iterator[None]:
    """Plans give so many of all CTAs to prefills: by prices of both roles that share so."""
    cost, prefills, decodes = counted(batch)
    work = prefills * cost.prefill, decodes * cost.decode
    wanted = (prefill + 0.5) / (CTAS - prefill - 0.5)
    asked = Rules.prices

    def prices(self: Rules, kernel: Kernel) -> RolePrices | None:
        found = asked(self, kernel)
        if found is None:
            return None
        first, second = found.units
        units = max(1, round(first * wanted * work[1] / work[0])), second
        return replace(found, units=units, saturating=2**31 - 1)

    with patch.object(Rules, "prices", prices):
        yield


@dataclass
class Split:
    """A plan, and its launches in a graph.

    Attributes:
        ctas: that prefill.
        name: of its row.
        times: milliseconds of a launch, one for each round.
    """

    attention: wl.AttentionWrapper
    ctas: int
    name: str
    graph: torch.cuda.CUDAGraph
    times: list[float]

    @classmethod
    def of(cls, attention: wl.AttentionWrapper, mixed: Mixed, name: str = "") -> Split:
        whole, graph = mixed.whole, torch.cuda.CUDAGraph()
        run = partial(attention.run, whole.q, (whole.k, whole.v))
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        assert attention.planned is not None
        ctas = attention.planned.plan.work_of_roles()[0].ctas
        return cls(attention, ctas, name or f"{ctas} CTAs", graph, [])

    def time(self) -> None:
        """One round more."""
        calls = 3 if not self.times else max(2, round(ROUND_MS / self.times[-1]))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        begin.record()
        for _ in range(calls):
            self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end) / calls)

    def row(self, batch: Batch) -> Row:
        """Its median; the first round only finds how many calls make one."""
        ms = statistics.median(self.times[1:])
        params = {**batch.case.params, "prefill_ctas": self.ctas}
        return Row(NAME, batch.name, self.name, round(ms * 1e3, 2), "us", ms=round(ms, 5),
                   samples=len(self.times) - 1, params=params)  # fmt: skip


def splits(batch: Batch, mixed: Mixed, others: Sequence[int]) -> list[Split]:
    """The one that is chosen first."""
    kind, whole = KINDS[batch.kind], mixed.whole
    attention = mixed_ours.with_roles(kind, whole)
    found = [Split.of(attention, mixed, CHOSEN)]
    wanted = sorted({found[0].ctas + by for by in others})
    for ctas in (n for n in wanted if LEAST <= n <= CTAS - LEAST):
        with forced(ctas, batch):
            one = planned(kind.variant(), whole, tile=attention.tile)
        found.append(Split.of(one, mixed))
    return found


def measure(
    report: Report, options: argparse.Namespace, batches: Sequence[Batch], end: float
) -> None:
    others = OTHERS[::3] if options.quick else OTHERS
    for batch in track(batches, "splits", console=report.console):
        if time.monotonic() > end:
            report.console.print("the limit ended the run")
            return
        torch.manual_seed(0)
        found = splits(batch, make_mixed(batch, options.device), others)
        for _ in range(ROUNDS + 1):
            for one in found:
                one.time()
        for one in found:
            report.add(one.row(batch))
        del found
        torch.cuda.empty_cache()


# --- what prices make of it -----------------------------------------------------------------------


class Prices(NamedTuple):
    """Factors of what ships.

    Attributes:
        prefill, decode: of the time of a key tile on one CTA.
        memory: of what all decoding CTAs read in a time.
    """

    prefill: float = 1.0
    decode: float = 1.0
    memory: float = 1.0


GRID = [Prices(*one) for one in product((0.9, 0.95, 1.0, 1.05, 1.1, 1.2), (0.85, 0.9, 1.0, 1.1),
                                        (0.9, 0.95, 1.0, 1.05))]  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """A batch that was run with several splits.

    Attributes:
        cost: of the key tiles of both roles.
        tiles: key tiles of all heads, of prefills and of decodes.
        work: of both roles, as planners count it.
        roles: with their tiles.
        ctas, ms: of each split, by rising CTAs that prefill.
        chosen: milliseconds of the split that was chosen when it was recorded.
    """

    name: str
    cost: RoleCost
    tiles: tuple[int, int]
    work: tuple[int, int]
    roles: Sequence[Role]
    ctas: Sequence[int]
    ms: Sequence[float]
    chosen: float

    def chosen_by(self, prices: Prices) -> int:
        """CTAs that prefill in plans by these prices."""
        cost = self.cost
        tiles = round(cost.prefill * prices.prefill), round(cost.decode * prices.decode)
        saturating = round(cost.saturating * prices.decode * prices.memory)
        return RolePrices.of_tiles(self.roles, tiles, saturating).ctas(self.work, CTAS)[0]

    def loss(self, ctas: int) -> float:
        """Its time over that of the best split; between two that were run, in proportion."""
        return float(np.interp(ctas, self.ctas, self.ms)) / min(self.ms)


def load(path: Path) -> list[Timed]:
    """The batches of a record."""
    _, rows = load_rows(path)
    tables = {batch.name: batch for batch in table_batches()}
    found = []
    for name in dict.fromkeys(row.case for row in rows if row.case != "ceiling"):
        of_batch = [row for row in rows if row.case == name and row.ms is not None]
        by_ctas = {row.params["prefill_ctas"]: row.ms for row in of_batch if row.ms}
        chosen = next(row.ms for row in of_batch if row.impl == CHOSEN and row.ms)
        batch = tables.get(name) or drawn_batch(int(name.partition(":")[0]))
        ctas = sorted(by_ctas)
        ms = [by_ctas[n] for n in ctas]
        cost, *tiles = counted(batch)
        roles, work = work_of(batch)
        found.append(Timed(name, cost, (tiles[0], tiles[1]), work, roles, ctas, ms, chosen))
    return found


def work_of(batch: Batch) -> tuple[Sequence[Role], tuple[int, int]]:
    """Both roles, and what all of their items cost, in the units of their cost models."""
    q_heads, kv_heads = batch.heads
    _, tile = priced(batch.kind, q_heads // kv_heads)
    first, second = roles = roles_of_tile(tile)
    segments, visibility = segments_of(batch)
    problem = Problem(
        segments, kv_heads, q_heads // kv_heads, first.rows, first.keys, CTAS, CTAS, visibility,
        smaller=(second,), prices=RolePrices((1, 1), 1),
    )  # fmt: skip
    prefill, decode = (
        int(own.cost_model.of_chunks(query_tiles(own).visible).sum()) * kv_heads
        for own in problem.by_role()
    )
    return roles, (prefill, decode)


def halves_of(batches: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """By fours, in which drawn batches have each kind of mask."""
    first = [one for number, one in enumerate(batches) if number // 4 % 2 == 0]
    return first, [one for one in batches if one not in first]


def mean_loss(batches: Sequence[Timed], prices: Prices) -> float:
    return geometric_mean([one.loss(one.chosen_by(prices)) for one in batches])


def fit(path: Path) -> None:
    """Prints what ships, and the best of the grid, for both halves of the batches and for all."""
    batches = load(path)
    halves = halves_of(batches)
    table = Table("", "prefill", "decode", "memory", "first half", "other half", "worst",
                  title=f"{path.name}, time over that of the best split")  # fmt: skip
    best = [min(GRID, key=partial(mean_loss, half)) for half in halves]
    for name, prices in (("shipped", Prices()), ("fitted to the first", best[0]),
                         ("fitted to the other", best[1])):  # fmt: skip
        losses = [mean_loss(half, prices) for half in halves]
        worst = max(batches, key=lambda one, by=prices: one.loss(one.chosen_by(by)))  # type: ignore[misc]
        table.add_row(
            name, *(f"{factor:g}" for factor in prices), *(f"{loss:.4f}" for loss in losses),
            f"{worst.loss(worst.chosen_by(prices)):.3f}, {worst.name}",
        )  # fmt: skip
    Console().print(table)
    taken = geometric_mean([one.chosen / min(one.ms) for one in batches])
    Console().print(f"When it was recorded, the chosen split took {taken:.4f} of the best.")


def main(argv: Sequence[str] | None = None) -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drawn", type=int, default=100, help="drawn batches, beside the twelve")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, compiling included")
    parser.add_argument("--quick", action="store_true", help="fewer splits")
    if (path := file_to_fit(parser, argv, NAME)) is not None:
        fit(path)
        return
    options = placed_arguments(parser, argv)
    report = report_with_ceilings(NAME, options)
    batches = [*table_batches(), *drawn_batches(options.drawn)]
    measure(report, options, batches, begin + options.limit)
    report.finish()


if __name__ == "__main__":
    main()
