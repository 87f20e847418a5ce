"""Decode over a paged cache beside its peers: lengths, pages of 16 and 1, selected pages, plans.

    python benchmarks/decode.py [--tables decode decode_page1] [--quick] [--only warploom]

GB/s count what must be moved: keys and values once, queries and outputs once. bf16, heads of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import peers_flashinfer as flashinfer
import torch
from batches import Inputs, Shape, label, lengths
from harness import Implementation, Thunk
from narrow_caches import TOKEN_SCALES, make_representable, narrow_cache, run_scaled
from peers import cudnn, planned, warploom
from selections import selection_trials
from tables import Setting, Table, Trial, attention_trial, main

import warploom as wl
from warploom.runtime.planning import rules

BATCHES = (16, 128)
HEADS = ((32, 8), (32, 32))
LENGTHS = {  # row: kind and mean, see `lengths`
    "1024": ("constant", 1024),
    "uniform 512-1024": ("uniform", 1024),
    "zipf, mean 1024": ("zipf", 1024),
    "8192": ("constant", 8192),
    "skewed 8k-64k": ("skew", 8192),
}
LONG = 131072


def decode_shape(lens: tuple[int, ...], heads: tuple[int, int], page_size: int) -> Shape:
    """One query row for each request."""
    return Shape((1,) * len(lens), lens, *heads, 128, torch.bfloat16, page_size)


def decode_trials(page_size: int, setting: Setting) -> Iterator[Trial]:
    contestants = (warploom(), *flashinfer.DECODE)
    for q_heads, kv_heads in setting.pick(HEADS, (4, 2)):
        for batch in setting.pick(BATCHES, 4):
            for row in setting.pick(tuple(LENGTHS), "uniform 512-1024"):
                kind, mean = LENGTHS[row]
                lens = lengths(kind, batch, mean if setting.on_gpu else 64)
                yield attention_trial(
                    f"{batch} x {row}, {q_heads}/{kv_heads}",
                    decode_shape(lens, (q_heads, kv_heads), page_size), contestants, unit="GB/s",
                )  # fmt: skip


def long_trials(setting: Setting) -> Iterator[Trial]:
    """One request over all CTAs."""
    contestants = (warploom(), cudnn(), *flashinfer.DECODE)
    length = LONG if setting.on_gpu else 1024
    for heads in setting.pick(HEADS, (4, 2)):
        for page_size in setting.pick((16, 1), 16):
            yield attention_trial(
                f"1 x {label(length)}, {heads[0]}/{heads[1]}, page {page_size}",
                decode_shape((length,), heads, page_size), contestants, unit="GB/s",
            )  # fmt: skip


def run_undivided(inputs: Sequence[Inputs]) -> list[Thunk]:
    """The same tiles assigned whole, the longest first, as if the planner could not cut them."""
    balanced = planned(wl.Causal(), inputs[0]).planned
    assert balanced is not None
    with patch.object(rules, "INVARIANT_SPLIT", 2 * LONG):
        attention = planned(wl.Causal(), inputs[0], batch_invariant=True, tile=balanced.kernel.tile)
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def balance_trials(setting: Setting) -> Iterator[Trial]:
    """Lengths of U(4096, 16384), and one request that is far longer."""
    contestants = (warploom(), Implementation("warploom uncut", run_undivided))
    for batch in setting.pick(BATCHES, 4):
        longest, giant = (16384, LONG) if setting.on_gpu else (64, 512)
        drawn = lengths("uniform", batch - 1, 2 * longest)  # longest and up
        lens = (giant, *(longest // 4 + (n - longest) * 3 // 4 for n in drawn))
        name = f"{batch - 1} x {longest // 4}-{longest} and one of {label(giant)}"
        for heads in setting.pick(HEADS, (4, 2)):
            shape = decode_shape(lens, heads, 16)
            yield attention_trial(f"{name}, {heads[0]}/{heads[1]}", shape, contestants, unit="us")


def narrow_trials(setting: Setting) -> Iterator[Trial]:
    """The figure is the time: the narrow cache has half the bytes."""
    contestants = (warploom(), narrow_cache(), Implementation(TOKEN_SCALES, run_scaled))
    for heads in setting.pick(HEADS, (4, 2)):
        for batch in setting.pick(BATCHES, 4):
            length = 8192 if setting.on_gpu else 256
            shape = decode_shape((length,) * batch, heads, 16)
            name = f"{batch} x {length}, {heads[0]}/{heads[1]}"
            trial = attention_trial(name, shape, contestants, unit="us")
            yield replace(trial, make=partial(make_representable, shape))


def step_of(inputs: Inputs) -> tuple[wl.AttentionWrapper, Callable[[], None]]:
    """A wrapper as generation loops have it, and its plan, from tables on the device."""
    batch, most = inputs.shape.batch, max(inputs.shape.kv_lens)
    bounds = wl.Bounds(batch, batch, most, len(inputs.indices))
    attention = planned(wl.Causal(), inputs, bounds=bounds, cuda_graph=True)
    tables = inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len
    plan = partial(attention.plan, *(table.to(inputs.q.device) for table in tables))
    plan()
    attention.check_plan()
    return attention, plan


def plan_and_run(inputs: Sequence[Inputs]) -> list[Thunk]:
    attention, plan = step_of(inputs[0])

    def step(one: Inputs) -> torch.Tensor:
        plan()
        return attention.run(one.q, (one.k, one.v))

    return [partial(step, one) for one in inputs]


def run_alone(inputs: Sequence[Inputs]) -> list[Thunk]:
    attention, _ = step_of(inputs[0])
    return [partial(attention.run, one.q, (one.k, one.v)) for one in inputs]


def plan_alone(inputs: Sequence[Inputs]) -> list[Thunk]:
    """Plans one after the other; what is checked is a run of such a plan."""
    attention, plan = step_of(inputs[0])
    out = attention.run(inputs[0].q, (inputs[0].k, inputs[0].v))

    def again() -> torch.Tensor:
        plan()
        return out

    return [again for _ in inputs]


def step_trials(setting: Setting) -> Iterator[Trial]:
    """A step of one layer whose graph holds the plan too, and its two halves."""
    contestants = (
        Implementation("warploom plan and run", plan_and_run),
        Implementation("warploom run", run_alone),
        Implementation("warploom plan", plan_alone),
    )
    length = 1024 if setting.on_gpu else 64
    for batch in setting.pick((16, 128, 1024), 4):
        shape = decode_shape((length,) * batch, (32, 8) if setting.on_gpu else (4, 2), 16)
        yield attention_trial(f"{batch} x {length}", shape, contestants, unit="us")


CEILINGS = ("copy", "read", "matmul")
TABLES = (
    Table("decode", partial(decode_trials, 16), CEILINGS),
    Table("decode_page1", partial(decode_trials, 1), CEILINGS),
    Table("decode_long", long_trials, CEILINGS),
    Table("decode_selections", selection_trials, CEILINGS),
    Table("decode_balance", balance_trials, CEILINGS),
    Table("decode_fp8", narrow_trials, CEILINGS),
    Table("decode_step", step_trials, CEILINGS),
)

if __name__ == "__main__":
    main(TABLES, __doc__ or "")
