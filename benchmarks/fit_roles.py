"""Fit when two roles are chosen to recorded mixed batches; needs no GPU.

    python benchmarks/fit_roles.py [FILE ...]

Files are what `mixed.py` wrote with `--tables mixed_drawn` and `mixed_light`, with the rows "one
tile" and "two roles". The margins of `role_cost.forecast` (decision 0056) are fitted to the first
two of five batches of each. Prints how much longer than the better of both the choice takes, with
the shipped numbers and with fitted ones: of the batches that were fitted to, and of the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from harness import RESULTS, load_rows
from mixed_batches import DIM, KINDS, PAGE, Batch, drawn_batch, light_batch
from mixed_goals import ONE_TILE, TWO_ROLES, geometric_mean
from rich.console import Console
from rich.table import Table

import warploom as wl
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.choice.role_cost import SHIPPED, Margins, RoleCost, forecast, role_cost
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import HostBatch, RoleSizes, RoleTiles
from warploom.runtime.planning.mixes import may_be_mixed
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.model.layout import Records
from warploom.scheduler.model.visibility import Visibility

FILES = "mixed_drawn_peers.jsonl", "mixed_light.jsonl"
CTAS = 132  # of the GPUs that were measured
SPREADS = (10, 15, 20, 25, 33, 50, 100)
LONGERS = (4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Timed:
    """A batch that was run both ways.

    Attributes:
        name: of its row.
        cost: of the key tiles of both roles.
        prefills, decodes: key tiles of all heads.
        is_asked: a wrapper asks whether two roles pay.
        one_tile, two_roles: milliseconds.
    """

    name: str
    cost: RoleCost
    prefills: int
    decodes: int
    is_asked: bool
    one_tile: float
    two_roles: float

    def pays(self, margins: Margins) -> bool:
        told = forecast(self.cost, self.prefills, self.decodes, CTAS, margins)
        return self.is_asked and told.pays

    def loss(self, margins: Margins) -> float:
        """The time of the choice over that of the better way."""
        taken = self.two_roles if self.pays(margins) else self.one_tile
        return taken / min(self.one_tile, self.two_roles)


@lru_cache
def priced(kind: str, group_size: int) -> tuple[RoleCost, TileConfig]:
    """Of the tiles of two roles that are asked first."""
    spec = AttentionSpec(trace(KINDS[kind].variant()), DIM, DIM, dtype("bfloat16"), wl.Paged(PAGE))
    tile = role_choices(spec, arch_named("sm_90a"), group_size)[0].tile
    return role_cost(spec, tile), tile


def lowered(batch: Batch) -> HostBatch:
    """As a wrapper sees it."""
    lengths = batch.shape.q_lens, batch.shape.kv_lens
    return make_batch(wl.Ragged(), *(np.append(0, np.cumsum(lens)) for lens in lengths)).on_host


def segments_of(batch: Batch) -> tuple[Records, Visibility]:
    """What planners get of a batch."""
    variant, arrays = KINDS[batch.kind].variant(), lowered(batch).arrays
    traced = trace(variant)
    analysis = TileAnalysis(traced, variant.inputs(), {})
    return arrays.segments, make_visibility(traced, analysis, arrays, Heads(*batch.heads))


def counted(batch: Batch) -> tuple[RoleCost, int, int]:
    """Prices, and key tiles of all heads of both roles."""
    q_heads, kv_heads = batch.heads
    cost, tile = priced(batch.kind, q_heads // kv_heads)
    assert tile.decode is not None
    sizes = RoleSizes(tile.decode.rows, tile.rows, tile.keys, tile.decode.keys)
    segments, visibility = segments_of(batch)
    tiles = RoleTiles.of(segments, sizes, q_heads // kv_heads, visibility)
    return cost, tiles.prefills * kv_heads, tiles.decodes * kv_heads


def load(path: Path) -> Iterator[Timed]:
    """The batches of a record that have both rows, in the order in which they are drawn."""
    _, rows = load_rows(path)
    drawn = {"mixed_drawn": drawn_batch, "mixed_light": light_batch}
    table = {row.case: row.benchmark for row in rows}
    ms = {(row.case, row.impl): row.ms for row in rows if row.ms is not None}
    for name in dict.fromkeys(row.case for row in rows if row.case != "ceiling"):
        both = ms.get((name, ONE_TILE)), ms.get((name, TWO_ROLES))
        if table[name] in drawn and both[0] is not None and both[1] is not None:
            batch = drawn[table[name]](int(name.partition(":")[0]))
            asked = may_be_mixed(lowered(batch).sizes, batch.heads[0] // batch.heads[1])
            yield Timed(name, *counted(batch), asked, both[0], both[1])


def parted(recorded: Sequence[Sequence[Timed]]) -> tuple[list[Timed], list[Timed]]:
    """Those that numbers are fitted to, two of five of each record, and the others."""
    ends = [len(batches) * 2 // 5 for batches in recorded]
    pairs = list(zip(recorded, ends, strict=True))
    fitted_to = [one for batches, end in pairs for one in batches[:end]]
    return fitted_to, [one for batches, end in pairs for one in batches[end:]]


def mean_loss(batches: Sequence[Timed], margins: Margins) -> float:
    return geometric_mean([one.loss(margins) for one in batches])


def fitted(batches: Sequence[Timed]) -> Margins:
    """The numbers of the grid with the least mean loss; of equal ones the nearest to the shipped.

    Losses within a thousandth count as equal, since times are not known to less.
    """
    grid = [Margins(spread, longer) for spread, longer in product(SPREADS, LONGERS)]

    def rank(one: Margins) -> tuple[float, float]:
        steps = (
            abs(SPREADS.index(one.spread) - SPREADS.index(SHIPPED.spread)),
            abs(LONGERS.index(one.longer) - LONGERS.index(SHIPPED.longer)),
        )
        return round(mean_loss(batches, one), 3), sum(steps)

    return min(grid, key=rank)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = [RESULTS / name for name in FILES]
    parser.add_argument("files", nargs="*", type=Path, default=default)
    files = parser.parse_args(argv).files
    recorded = [list(load(file)) for file in files]
    if not any(recorded):
        parser.error(f"no batch of {files} has the rows {ONE_TILE!r} and {TWO_ROLES!r}")
    first, others = parted(recorded)
    table = Table("", "1 of", "decodes longer by 1 of", "fitted to", "left out",
                  "worst")  # fmt: skip
    for name, margins in (("shipped", SHIPPED), ("fitted", fitted(first))):
        losses = (f"{mean_loss(part, margins):.4f}" if part else "" for part in (first, others))
        worst = max(others or first, key=lambda one, by=margins: one.loss(by))  # type: ignore[misc]
        table.add_row(
            name, str(margins.spread), str(margins.longer), *losses,
            f"{worst.loss(margins):.3f}, {worst.name}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
