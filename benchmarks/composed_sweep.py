"""Time composed plans of shared prefixes with several tiles, beside the single format.

    python benchmarks/composed_sweep.py [--every-tile] [--quick] [--out FOLDER]

The cases of shared_prefix.py, each with every tile that the model of costs weighs
(`codegen/choice/composed_cost.py`), or with --every-tile with all that a batch may get. The
single format's output is compared with float64, those of the tiles with the single format's. The
rows go to composed_tiles.jsonl, from which fit_composed_tiles.py makes the model's rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Implementation,
    Report,
    Row,
    Thunk,
    copies_needed,
    placed,
    time_one,
)
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from shared_prefix import (
    DIM,
    PAGE,
    TOLERANCE,
    Shared,
    cases_on,
    check_against_float64,
    declared,
    make_inputs,
    planned,
)

import warploom as wl
from warploom.codegen.attention.templates import CPU
from warploom.codegen.build import build_all
from warploom.codegen.choice.composed_cost import composed_tiles
from warploom.codegen.choice.tile_choice import every_tile
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.errors import WarploomError

NAME, SINGLE = "composed_tiles", "single format"


def tiles_on(device: torch.device, every_tile_too: bool) -> list[TileConfig]:
    """The tiles to time: those that the model weighs where there is a model, else all."""
    attention = declared(wl.Composed(PAGE), 1, 1, DIM, device)
    spec, target = attention.spec, attention.target
    if not isinstance(target, Arch):
        return list(dict.fromkeys(CPU.choose(spec, rows).tile for rows in (1, 48)))
    weighed = [] if every_tile_too else composed_tiles(spec, target)
    return weighed or every_tile(spec, target)


def build(cases: Sequence[Case], tiles: Sequence[TileConfig], device: torch.device) -> None:
    """Compile all kernels in parallel. One that fails shows again where it is to be timed."""
    choices = [TileChoice(tile) for tile in tiles]
    jobs = {}  # most numbers of heads share their kernels
    for q_heads, kv_heads in dict.fromkeys(
        (case.params["q_heads"], case.params["kv_heads"]) for case in cases
    ):
        composed, single = (
            declared(kv_format, q_heads, kv_heads, DIM, device)
            for kv_format in (wl.Composed(PAGE), wl.Paged(PAGE))
        )
        jobs |= dict.fromkeys(composed.build_jobs(choices) + single.build_jobs())
    try:
        build_all(list(jobs))
    except WarploomError as failure:
        print(str(failure)[:2000])


def calls(attention: wl.AttentionWrapper, inputs: Sequence[Shared]) -> list[Thunk]:
    """One call for each copy; outputs begin as NaN, so that what is not written is wrong."""
    outs = [torch.full_like(case.q, torch.nan) for case in inputs]
    return [
        partial(attention.run, case.q, case.kv, out=out)
        for case, out in zip(inputs, outs, strict=True)
    ]


def check_against(expected: torch.Tensor) -> Check:
    truth = expected.float()
    return Check(lambda out: float((out.float() - truth).norm() / truth.norm()), TOLERANCE)


def time_case(
    case: Case, tiles: Sequence[TileConfig], effort: Effort, device: torch.device
) -> Iterator[Row]:
    """A row for the single format, then one for each tile."""
    inputs = [make_inputs(case, device) for _ in range(copies_needed(case, device))]
    single = planned(wl.Paged(PAGE), inputs[0])
    tile = single.tile
    params = case.params | {"single_tile": tile.label if tile else ""}
    yield time_one(
        NAME, replace(case, params=params), Implementation(SINGLE, partial(calls, single)),
        inputs, check_against_float64(inputs[0]), effort, device,
    )  # fmt: skip
    check = check_against(single.run(inputs[0].q, inputs[0].kv))

    def prepare(tile: TileConfig, inputs: Sequence[Shared]) -> list[Thunk]:
        return calls(planned(wl.Composed(PAGE), inputs[0], tile), inputs)

    for tile in tiles:
        one = Implementation(tile.label, partial(prepare, tile))
        yield time_one(NAME, case, one, inputs, check, effort, device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-tile", action="store_true", help="also those not weighed")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    options = placed(parser, argv)
    device = options.device
    torch.manual_seed(0)
    effort = QUICK if options.quick else Effort()
    report = Report(NAME, device, options.out)
    cases = [replace(case, unit="us") for case in cases_on(device)]
    tiles = tiles_on(device, options.every_tile)
    build(cases, tiles, device)
    columns = (TextColumn("timing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=report.console) as bar:
        task = bar.add_task("", total=len(cases) * (1 + len(tiles)))
        for case in cases:
            bar.update(task, description=case.name)
            for row in time_case(case, tiles, effort, device):
                report.add(row)
                bar.advance(task)
    report.finish()


if __name__ == "__main__":
    main()
