"""The model that chooses tiles, beside the sweep that it was fitted to; no device, no timing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import warploom as wl
from warploom.codegen.attention.templates import cuda_launch, render_cuda
from warploom.codegen.choice.tile_choice import choose_tile, every_tile, tiles_weighed
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16, kv_dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, UnsupportedSpec
from warploom.scheduler.model.layout import c_structs

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
SWEEPS = ("tile_sweep", "tile_sweep_small_heads")
HOPPER = arch_named("sm_90a")
KV_HEADS = 8  # of the sweep


@cache
def spec(dim: int, kv_format: KVFormat, variant: type[wl.Variant] = wl.Causal) -> AttentionSpec:
    return AttentionSpec(trace(variant()), dim, dim, bfloat16, kv_format)


@cache
def recorded(name: str) -> tuple[int, dict[tuple[int, ...], dict[TileConfig, float]]]:
    """SMs, and (head_dim, fused rows, requests, keys, group size) -> tile -> microseconds."""
    machine, *rows = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    cases: dict[tuple[int, ...], dict[TileConfig, float]] = defaultdict(dict)
    for row in rows:
        case = row["params"]
        if (case["dim"] <= 64) != ("small" in name):
            continue  # the first sweep knew no Hopper tiles of three groups
        names = ("dim", "fused_rows", "requests", "keys", "group_size")
        if row["value"] is not None:
            cases[tuple(case[name] for name in names)][TileConfig(**case["tile"])] = row["value"]
    return machine["machine"]["multiprocessors"], cases


@pytest.mark.parametrize("lengths_known", [True, False])
@pytest.mark.parametrize("name", SWEEPS)
def test_choices_are_close_to_the_best_of_the_sweep(name: str, lengths_known: bool) -> None:
    sms, cases = recorded(name)
    losses = {}
    for case, times in cases.items():
        dim, fused_rows, requests, keys, _ = case
        if fused_rows == 1:
            continue  # has a tile of its own, which the sweep does not know
        given = keys if lengths_known else None
        tile = choose_tile(
            spec(dim, wl.Paged(16)), HOPPER, fused_rows, requests * KV_HEADS / sms, given
        ).tile
        losses[case] = times[tile] / min(times.values())
    worst = sorted(losses.items(), key=lambda found: -found[1])[:10]
    assert worst[0][1] <= 1.5, worst
    assert sum(loss <= 1.1 for loss in losses.values()) >= 0.9 * len(losses), worst


def test_the_cheapest_tile_comes_first_and_says_so() -> None:
    choice = choose_tile(spec(128, wl.Paged(16)), HOPPER, 4, 0.5, 1000)
    names, costs = zip(*choice.costs, strict=True)
    assert names[0] == choice.tile.label and list(costs) == sorted(costs) and costs[0] > 0
    assert len(names) == len(tiles_weighed(spec(128, wl.Paged(16)), HOPPER)) == 4
    assert "cheapest of 4" in choice.reason and "1000 keys" in choice.reason


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_more_rows_take_higher_tiles(dim: int) -> None:
    rows = [
        choose_tile(spec(dim, wl.Ragged()), HOPPER, n, 4).tile.rows
        for n in (1, 2, 16, 17, 64, 4000)
    ]
    assert rows == sorted(rows) and rows[:2] == [1, 16]
    assert rows[-1] == (192 if dim == 64 else 128)


@pytest.mark.parametrize("dim", [8, 64, 72, 128, 256])
def test_a_choice_is_one_of_the_tiles_that_are_warmed_up_and_swept(dim: int) -> None:
    of = spec(dim, wl.Ragged())
    pool = tiles_weighed(of, HOPPER)
    assert set(pool) <= set(every_tile(of, HOPPER))
    for rows in (2, 5, 30, 100, 1000):
        assert all(choose_tile(of, HOPPER, rows, n).tile in pool for n in (0.01, 0.7, 3, 40, None))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("items", [2, 8, 31, 250])
@pytest.mark.parametrize("keys", [200, 1024, 65_536])
def test_decoding_streams_keys(dim: int, items: float, keys: int) -> None:
    tile = choose_tile(spec(dim, wl.Paged(16)), HOPPER, 4, items, keys).tile
    assert (tile.rows, tile.keys, tile.warps) == (16, 64, 2)


def test_few_rows_over_very_many_keys_read_them_once() -> None:
    tile = choose_tile(spec(128, wl.Paged(16)), HOPPER, 128, 8 / 132, 131_072).tile
    assert tile.template == "hopper"


def test_narrow_heads_have_three_groups_if_logits_read_nothing() -> None:
    def rows(dim: int, kv_format: KVFormat, variant: type[wl.Variant] = wl.Causal) -> int:
        return choose_tile(spec(dim, kv_format, variant), HOPPER, 2000, 50, 2000).tile.rows

    assert rows(64, wl.Ragged()) == rows(40, wl.Paged(16)) == rows(64, wl.Paged(1)) == 192
    assert rows(128, wl.Ragged()) == rows(64, wl.Paged(64)) == 128  # 96 keys are no whole pages
    assert rows(64, wl.Ragged(), wl.DocumentMask) == rows(64, wl.Ragged(), wl.Rope) == 128


@pytest.mark.parametrize(
    ("rows", "height"),
    [(128, 128), (192, 192), (256, 128), (384, 192), (512, 128), (768, 192), (1024, 128)],
)
def test_small_heads_of_large_batches_have_the_tile_that_is_padded_least(
    rows: int, height: int
) -> None:
    sms, cases = recorded("tile_sweep_small_heads")
    requests, keys = 64, 2048
    times = cases[64, rows, requests, keys, 1]
    chosen = choose_tile(spec(64, wl.Paged(16)), HOPPER, rows, requests * KV_HEADS / sms, keys).tile
    assert chosen == min(times, key=times.__getitem__)
    assert chosen.rows == height


@pytest.mark.parametrize(("dim", "requests"), [(64, 64), (32, 32)])
def test_long_prompts_of_small_heads_have_the_tile_that_computes_rows_fastest(
    dim: int, requests: int
) -> None:
    """The sweep ends at 1,024 rows; of more, padding is a small part, so it is left out."""
    sms, cases = recorded("tile_sweep_small_heads")
    rows, keys = 1024, 2048
    of_a_row = {
        tile: us / (math.ceil(rows / tile.rows) * tile.rows)
        for tile, us in cases[dim, rows, requests, keys, 1].items()
    }
    fastest = min(of_a_row, key=of_a_row.__getitem__)
    for prompt in (2048, 4096, 8192, 16_384):
        items = 16_384 / prompt * KV_HEADS / sms
        assert choose_tile(spec(dim, wl.Ragged()), HOPPER, prompt, items, prompt).tile == fastest


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (spec(64, wl.Ragged(), wl.Rope), "query_transform takes a share"),
        (spec(64, wl.Ragged(), wl.QKNorm), "query_transform takes a share"),
        (spec(64, wl.Ragged(), wl.DocumentMask), "what they read of fields"),
        (spec(64, wl.Composed(16)), "positions of their own"),
        (spec(128, wl.Ragged()), "more than 64 lanes"),
    ],
)
def test_three_groups_are_refused_where_registers_end(of: AttentionSpec, reason: str) -> None:
    tile = TileConfig(192, 96, 12, 3, "hopper", 2)
    with pytest.raises(UnsupportedSpec, match=rf"{reason}.*TileConfig\(128, 128"):
        cuda_launch(of, tile, HOPPER)
    with pytest.raises(UnsupportedSpec, match=reason):
        render_cuda(of, tile, c_structs(of.kv_format.composed))


def test_what_no_sweep_covers_is_chosen_by_rows() -> None:
    assert not tiles_weighed(spec(128, wl.Ragged()), arch_named("sm_80"))
    assert not tiles_weighed(spec(128, wl.Composed(16)), HOPPER)
    assert not tiles_weighed(spec(128, wl.BlockSparse(block=(16, 16))), HOPPER)
    assert not tiles_weighed(spec(128, wl.Ragged(), wl.Rope), HOPPER)
    assert choose_tile(spec(128, wl.Ragged(), wl.Rope), HOPPER, 64).tile.rows == 64
    assert not choose_tile(spec(128, wl.Ragged()), arch_named("sm_80"), 64).costs


def test_a_tile_of_no_template_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tile: names .*'blackwell'.* 'hopper', 'portable'"):
        render_cuda(spec(64, wl.Ragged()), TileConfig(64, 64, template="blackwell"), c_structs())  # type: ignore[arg-type]


def test_the_hopper_template_takes_keys_of_8_bits_of_128_lanes_alone() -> None:
    tile = TileConfig(128, 64, 8, 2, "hopper")
    for dims in ((128, 128), (112, 128)):
        of = AttentionSpec(trace(wl.Causal()), *dims, bfloat16, wl.Ragged(), kv_dtype("int8"))
        assert "KvElement = warploom::i8_t" in render_cuda(of, tile, c_structs()).text
    for dims in ((64, 64), (96, 96), (128, 64), (256, 256)):
        of = AttentionSpec(trace(wl.Causal()), *dims, bfloat16, wl.Ragged(), kv_dtype("int8"))
        refused = r"hopper 128x64.*of 112 and 128 lanes alone.*portable"
        with pytest.raises(UnsupportedSpec, match=refused):
            render_cuda(of, tile, c_structs())


def test_a_tile_is_shown_as_it_would_be_written() -> None:
    tile = TileConfig(128, 64, 8, template="hopper", decode=TileConfig(8, 192, 6))
    assert repr(tile) == (
        "TileConfig(rows=128, keys=64, warps=8, template='hopper', "
        "decode=TileConfig(rows=8, keys=192, warps=6))"
    )
    assert eval(repr(tile)) == tile
