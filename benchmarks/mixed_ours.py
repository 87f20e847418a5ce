"""Ways of warploom to run a mixed batch: one plan, two wrappers in turn or side by side, halves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from batches import Inputs, Shape, page_table, starts
from harness import Implementation, Output, Thunk
from mixed_batches import Kind, Mixed
from mixed_goals import (
    DECODE_ALONE,
    ONE_PLAN,
    ONE_TILE,
    OWN_SERIAL,
    PORTABLE_TILE,
    PREFILL_ALONE,
    TWO_ROLES,
    TWO_STREAMS,
)
from narrow_caches import PORTABLE
from peers import planned
from peers_mixed import in_turn
from plan_time import timed

import warploom as wl
from warploom.codegen.choice.role_choice import role_choices
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileConfig
from warploom.runtime.devices.device import cuda_facts

BESIDE = "two CTAs an SM"
# small enough for one of prefill and one of decode on each SM of a Hopper GPU
SMALL_PREFILLS = tuple(TileConfig(64, 64, 4, stages, "hopper") for stages in (2, 3))
SMALL_DECODES = (TileConfig(16, 64, 2), TileConfig(16, 32, 2))
# parts of the CTAs that prefill may use beside decode; None limits neither
SPLITS = (None, 1 / 3, 1 / 2, 2 / 3)
PLANS = 60  # that are timed


def tile_for_all(attention: wl.AttentionWrapper, shape: Shape) -> TileConfig | None:
    """The tile of the batch that was planned last, or would be, if all of it had one."""
    tile = attention.tile
    if tile is None or not tile.of_roles:
        return tile
    if isinstance(attention.target, Arch):
        sms = cuda_facts(torch.cuda.current_device()).num_sms
        rows = sum(shape.q_lens) / shape.batch * shape.q_heads / shape.kv_heads
        share = shape.batch * shape.kv_heads / sms
        tile = choose_tile(attention.spec, attention.target, rows, share, max(shape.kv_lens)).tile
    return replace(tile, decode=None)


def without_roles(kind: Kind, inputs: Inputs) -> wl.AttentionWrapper:
    """A wrapper whose plan has one tile for all requests, whatever a wrapper chooses by itself."""
    attention = planned(kind.variant(), inputs)
    tile = tile_for_all(attention, inputs.shape)
    if tile is attention.tile:
        return attention
    return planned(kind.variant(), inputs, tile=tile)


def with_roles(kind: Kind, inputs: Inputs) -> wl.AttentionWrapper:
    """A wrapper whose plan has two roles, whether they pay or not."""
    attention = planned(kind.variant(), inputs)
    tile, shape = attention.tile, inputs.shape
    if tile is not None and tile.of_roles:
        return attention
    assert isinstance(attention.target, Arch)
    choices = role_choices(attention.spec, attention.target, shape.q_heads // shape.kv_heads)
    return planned(kind.variant(), inputs, tile=choices[0].tile)


def calls(attention: wl.AttentionWrapper, inputs: Sequence[Inputs]) -> list[Thunk]:
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def run_one_plan(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    whole = [one.whole for one in batches]
    return calls(planned(kind.variant(), whole[0]), whole)


def run_one_tile(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    whole = [one.whole for one in batches]
    return calls(without_roles(kind, whole[0]), whole)


def run_two_roles(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    whole = [one.whole for one in batches]
    return calls(with_roles(kind, whole[0]), whole)


def run_half(kind: Kind, share: float | None, inputs: Sequence[Inputs]) -> list[Thunk]:
    """A wrapper of its own for requests of one kind; with a share of the CTAs, or all."""
    attention = planned(kind.variant(), inputs[0])
    if share is not None and attention.planned is not None:
        limit = max(1, round(share * attention.planned.kernel.num_ctas))
        attention = planned(kind.variant(), inputs[0], sm_limit=limit)
    return calls(attention, inputs)


def run_prefill(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    def call(run: Thunk) -> Output:
        return run(), None

    return [partial(call, run) for run in run_half(kind, None, [one.prefill for one in batches])]


def run_decode(kind: Kind, batches: Sequence[Mixed]) -> list[Thunk]:
    def call(run: Thunk) -> Output:
        return None, run()

    return [partial(call, run) for run in run_half(kind, None, [one.decode for one in batches])]


def run_streams(kind: Kind, share: float | None, batches: Sequence[Mixed]) -> list[Thunk]:
    """Both halves at once, each with a part of the CTAs."""
    prefill = run_half(kind, share, [one.prefill for one in batches])
    rest = None if share is None else 1 - share
    decode = run_half(kind, rest, [one.decode for one in batches])
    return at_once(prefill, decode, batches[0].whole.q.device)


def run_beside(
    kind: Kind, of_prefill: TileConfig, of_decode: TileConfig, batches: Sequence[Mixed]
) -> list[Thunk]:
    """Both halves at once, a CTA of each on each SM: what POD-Attention's paper does (section 4).

    Decodes come first, and are limited to a CTA an SM, so that each SM has room for a prefill.
    """
    device = batches[0].whole.q.device
    halves = [one.prefill for one in batches], [one.decode for one in batches]
    tiles, sms = (of_prefill, of_decode), cuda_facts(device.index or 0).num_sms
    prefill, decode = (
        calls(planned(kind.variant(), half[0], tile=tile, sm_limit=sms), half)
        for half, tile in zip(halves, tiles, strict=True)
    )
    return at_once(prefill, decode, device)


def at_once(prefill: Sequence[Thunk], decode: Sequence[Thunk], device: torch.device) -> list[Thunk]:
    """Decode begins on a stream of its own, which forks and joins."""
    side = torch.cuda.Stream(device)

    def both(first: Thunk, second: Thunk) -> Output:
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            of_decode = second()
        of_prefill = first()
        main.wait_stream(side)
        return of_prefill, of_decode

    return [partial(both, *pair) for pair in zip(prefill, decode, strict=True)]


def split_name(share: float | None) -> str:
    return "no limit" if share is None else f"prefill on {share:.0%} of the CTAs"


def ways(kind: Kind, on_gpu: bool) -> dict[str, list[Implementation]]:
    """Row -> the ways of it, of which the fastest counts; a CPU has no streams."""
    alone = partial(run_half, kind, None)
    rows: dict[str, Callable[[Sequence[Mixed]], Sequence[Thunk]]] = {
        ONE_PLAN: partial(run_one_plan, kind),
        ONE_TILE: partial(run_one_tile, kind),
        OWN_SERIAL: partial(in_turn, alone, alone),
        PREFILL_ALONE: partial(run_prefill, kind),
        DECODE_ALONE: partial(run_decode, kind),
    }
    made = {row: [Implementation(row, prepare)] for row, prepare in rows.items()}
    if on_gpu:
        made[TWO_ROLES] = [Implementation(TWO_ROLES, partial(run_two_roles, kind))]
        made[BESIDE] = [
            Implementation(f"{first.label} beside {then.label}",
                           partial(run_beside, kind, first, then))
            for first, then in product(SMALL_PREFILLS, SMALL_DECODES)
        ]  # fmt: skip
        made[TWO_STREAMS] = [
            Implementation(split_name(share), partial(run_streams, kind, share)) for share in SPLITS
        ]
    return made


def portable_ways(kind: Kind, on_gpu: bool) -> dict[str, list[Implementation]]:
    """One tile of the template that all GPUs have."""

    def run(batches: Sequence[Mixed]) -> list[Thunk]:
        whole = [one.whole for one in batches]
        return calls(planned(kind.variant(), whole[0], tile=PORTABLE), whole)

    return {PORTABLE_TILE: [Implementation(PORTABLE_TILE, run)]} if on_gpu else {}


# --- about the plan -------------------------------------------------------------------------------


def way_of(attention: wl.AttentionWrapper) -> str:
    """Which way a plan took, from `explain()`: its tile, or what each role does."""
    facts = attention.explain().facts
    roles = [f"{name.removeprefix('role ')}: {told}" for name, told in facts.items()
             if name.startswith("role ")]  # fmt: skip
    if roles:
        return "roles; " + "; ".join(roles)
    return f"one tile: {facts.get('template')}, {facts.get('tile')}"


def tables_of(shape: Shape) -> tuple[torch.Tensor, ...]:
    return starts(shape.q_lens), *page_table(shape.kv_lens, shape.page_size)


def plan_us(
    attention: wl.AttentionWrapper, shape: Shape, pages_on: torch.device | None = None
) -> float:
    """Median host time of a plan: this batch and one of a token less in turn, as decoding goes.

    Page numbers are on the host, where a plan checks and copies them, or stay on a device.
    """
    least = zip(shape.q_lens, shape.kv_lens, strict=True)
    shorter = replace(shape, kv_lens=tuple(max(rows, keys - 1) for rows, keys in least))
    both = [
        (qo, kv, pages if pages_on is None else pages.to(pages_on), last)
        for qo, kv, pages, last in map(tables_of, (shape, shorter))
    ]

    def plans() -> None:
        for tables in both:
            attention.plan(*tables)

    timed(plans, 5)
    return round(statistics.median(timed(plans, PLANS // 2)) * 1e3 / len(both), 1)


def facts_of_plan(kind: Kind, mixed: Mixed) -> dict[str, Any]:
    """What is kept beside the row of one plan."""
    attention = planned(kind.variant(), mixed.whole)
    way, shape = way_of(attention), mixed.whole.shape
    found = {"way": way, "plan_us": plan_us(attention, shape)}
    if mixed.whole.q.device.type != "cpu":
        found["plan_us_pages_on_device"] = plan_us(attention, shape, mixed.whole.q.device)
    return found


# --- pure batches through the same object ---------------------------------------------------------


def run_after_mixed(kind: Kind, mixed: Inputs, inputs: Sequence[Inputs]) -> list[Thunk]:
    """A wrapper that has planned and run a mixed batch plans a pure one."""
    attention = planned(kind.variant(), mixed)
    attention.run(mixed.q, (mixed.k, mixed.v))
    first = inputs[0]
    attention.plan(first.qo_indptr, first.kv_indptr, first.indices, first.last_page_len)
    return calls(attention, inputs)


def run_pure(kind: Kind, inputs: Sequence[Inputs]) -> list[Thunk]:
    return calls(without_roles(kind, inputs[0]), inputs)
