"""The benchmark harness never loses a run, times no wrong result, and invents no figure."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def plot(harness: ModuleType) -> ModuleType:
    import plot  # pyright: ignore[reportMissingImports]

    return plot


def measure(harness: ModuleType, name: str, prepare: object) -> Any:
    case = harness.Case("add", work=1e-6, unit="GB/s", input_bytes=32, params={"n": 4})
    check = harness.Check(lambda out: float((out - 2.0).abs().max()), tolerance=1e-6)
    implementation = harness.Implementation(name, prepare)
    inputs = [torch.ones(4)]
    return harness.time_one("toy", case, implementation, inputs, check, harness.QUICK, CPU)


def test_a_right_result_gets_a_figure(harness: ModuleType) -> None:
    row = measure(harness, "add", lambda inputs: [lambda: inputs[0] + 1.0])
    assert row.value > 0 and row.error == 0.0 and row.note == ""
    assert row.ms_low <= row.ms <= row.ms_high
    assert row.samples >= harness.QUICK.replays


@pytest.mark.parametrize("wrong", [3.0, float("nan")])
def test_a_wrong_result_is_not_timed(harness: ModuleType, wrong: float) -> None:
    row = measure(harness, "add", lambda inputs: [lambda: inputs[0] * wrong])
    assert row.value is None and row.note.startswith("wrong: relative error")


def test_a_refusal_or_failure_becomes_a_note(harness: ModuleType) -> None:
    def refuse(inputs: object) -> None:
        raise harness.NotAvailable("not installed")

    def fail(inputs: object) -> None:
        raise ValueError("no such head_dim\nlong trace")

    assert measure(harness, "peer", refuse).note == "n/a: not installed"
    assert measure(harness, "peer", fail).note == "failed: ValueError: no such head_dim"


def test_rows_survive_the_file(harness: ModuleType, plot: ModuleType, tmp_path: Path) -> None:
    report = harness.Report("toy", CPU, tmp_path)
    report.add(measure(harness, "warploom", lambda inputs: [lambda: inputs[0] + 1.0]))
    report.add(measure(harness, "peer", lambda inputs: [lambda: inputs[0] * 5.0]))
    machine, rows = harness.load_rows(tmp_path / "toy.jsonl")
    assert rows == report.rows and machine == report.facts
    table = plot.markdown("toy", machine, rows)
    assert "| | warploom | peer |" in table
    assert "| wrong |" in table and "- peer: wrong: relative error" in table


def test_copies_outgrow_the_cache(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    for size, copies in ((64 << 20, 4), (1 << 30, 1), (1 << 20, harness.MAX_COPIES)):
        case = harness.Case("c", 1.0, "GB/s", size)
        assert harness.copies_needed(case, cuda) == copies


@pytest.mark.parametrize("name", ["prefill", "decode", "prefill_paged"])
def test_pictures_show_every_measured_implementation(
    plot: ModuleType, harness: ModuleType, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    rows = [harness.Row(name, "ceiling", "matmul", 700.0, "TFLOP/s")]
    rows += [harness.Row(name, "a", impl, 400.0, "TFLOP/s") for impl in ("warploom", "peer")]
    rows += [harness.Row(name, "a", "absent", None, "TFLOP/s", note="n/a: not installed")]
    plot.draw(name, {"device": "test", "torch": "2"}, rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000


def two_units(harness: ModuleType) -> list[Any]:
    name = "key_transforms"
    return [
        harness.Row(name, "ceiling", "matmul", 700.0, "TFLOP/s"),
        harness.Row(name, "ceiling", "copy", 4200.0, "GB/s"),
        harness.Row(name, "prefill", "before", 600.0, "TFLOP/s"),
        harness.Row(name, "prefill", "group", 500.0, "TFLOP/s"),
        harness.Row(name, "decode", "fused", 2300.0, "GB/s"),
        harness.Row(name, "decode", "before", None, "GB/s", note="n/a: no room"),
    ]


def test_each_unit_has_a_table_with_its_own_ways_and_ceilings(
    harness: ModuleType, plot: ModuleType
) -> None:
    facts = {"device": "test", "torch": "2", "date": "today", "commit": "none"}
    text = plot.markdown("key_transforms", facts, two_units(harness))
    prefill, decode = text.split("**: ")[1:]
    assert prefill.startswith("TFLOP/s, higher is better. For scale: 700 (matmul).")
    assert "| | before | group |" in prefill and "| prefill | 600 | 500 |" in prefill
    assert "copy" not in prefill and "decode" not in prefill
    assert decode.startswith("GB/s, higher is better. For scale: 4200 (copy).")
    assert "| | fused | before |" in decode and "| decode | 2300 | n/a |" in decode
    assert "- before: n/a: no room" in decode and text.count("<sub>") == 1


def test_each_unit_has_axes_of_its_own(
    harness: ModuleType, plot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    bars = plot.DRAWINGS["key_transforms"]
    monkeypatch.setitem(
        plot.DRAWINGS,
        "key_transforms",
        lambda axes, rows: (bars(axes, rows), drawn.append((axes, {row.unit for row in rows}))),
    )
    picture = tmp_path / "picture.png"
    plot.draw("key_transforms", {"device": "t", "torch": "2"}, two_units(harness), picture)
    (first, of_first), (second, of_second) = drawn
    assert first is not second and (of_first, of_second) == ({"TFLOP/s"}, {"GB/s"})
    assert first.get_ylim()[1] < 1000 < second.get_ylim()[1]
    assert picture.stat().st_size > 5_000


def test_ways_that_are_compared_differ_in_colour_and_keep_it(
    harness: ModuleType, plot: ModuleType
) -> None:
    _, rows = harness.load_rows(harness.RESULTS / "key_transforms.jsonl")
    ways = {row.impl for row in rows if row.case != "ceiling"}
    colors = {plot.base_color(way) for way in ways}
    assert len(colors) == len(ways) and not colors & {*plot.LIBRARIES.values(), plot.OTHERS}
    assert plot.color_of("before", ["group", "before"]) == plot.color_of("before", ["before"])


@pytest.mark.parametrize(
    "name", ["virtual_growth", "virtual_attention_cpu", "virtual_handover", "async_schedule"]
)
def test_recorded_ways_have_bars_of_their_own_colours(
    plot: ModuleType, harness: ModuleType, name: str
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    _, rows = harness.load_rows(harness.RESULTS / f"{name}.jsonl")
    for part in plot.by_unit(rows):
        axes = figures.Figure().add_subplot()
        plot.DRAWINGS[name](axes, part)
        heights = [bar.get_height() for group in axes.containers for bar in group]
        assert sorted(filter(None, heights)) == sorted(row.value for row in part)
        ways = list(dict.fromkeys(row.impl for row in part))
        assert len({plot.color_of(way, ways) for way in ways}) == len(ways)
        simulated = {row.params.get("simulated_ms") for row in part} - {None}
        assert simulated == {y for line in axes.lines for y in line.get_ydata()}


@pytest.mark.some(10)
@pytest.mark.parametrize(
    ("script", "table"),
    [("prefill", f"prefill{name}") for name in
     ("", "_full", "_variants", "_own", "_rope", "_ragged", "_paged", "_split")]
    + [
        ("decode", f"decode{name}")
        for name in ("", "_page1", "_long", "_selections", "_balance", "_fp8", "_step")
    ]
    + [("append", "append")],
)  # fmt: skip
def test_every_table_is_right_where_it_is_small(
    harness: ModuleType, plot: ModuleType, script: str, table: str, tmp_path: Path
) -> None:
    tables = __import__("tables")
    chosen = [one for one in __import__(script).TABLES if one.name == table]
    only = "warploom,warploom causal,warploom without,warploom uncut,warploom e4m3 cache"
    only += ",warploom plan and run,warploom run,warploom plan"
    tables.main(chosen, "", ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only", only])
    machine, rows = harness.load_rows(tmp_path / f"{table}.jsonl")
    measured = [row for row in rows if row.case != "ceiling" and row.impl.startswith("warploom")]
    assert measured and all(row.value is not None for row in measured), measured
    assert table in plot.TITLES and table in plot.DRAWINGS
    assert "warploom" in plot.markdown(table, machine, rows)


def test_an_append_that_writes_elsewhere_too_is_wrong(harness: ModuleType) -> None:
    append, batches = __import__("append"), __import__("batches")
    shape = batches.Shape((3, 1), (20, 40), 2, 2, append.DIM, torch.bfloat16, append.PAGE)
    for way in append.WAYS.values():
        batch = append.make_batch(way, shape, CPU)
        check = append.check_append(batch)
        (call,) = append.CONTESTANTS[0].prepare([batch])
        cache = call()
        assert check.relative_error(cache) < append.TOLERANCE
        page, slot = divmod(int(batch.places()[2][0]), append.PAGE)
        cache[1, page, slot - 1] = 1.0  # the token before the first new one
        assert check.relative_error(cache) > append.TOLERANCE


def test_a_table_without_figures_is_left_out(
    harness: ModuleType, plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.Report("append", CPU, tmp_path).add(
        harness.Row("append", "ceiling", "copy", 700.0, "GB/s")
    )
    plot.main([str(tmp_path)])
    assert "New keys" not in capsys.readouterr().out and not list(tmp_path.glob("*.png"))


def test_records_of_a_gpu_without_a_rate_are_named(harness: ModuleType, plot: ModuleType) -> None:
    def record(device: str, *rates: str) -> tuple[dict[str, str], list[Any]]:
        rows = [harness.Row("x", "ceiling", f"{rate} of all", 1.0, "GB/s") for rate in rates]
        return {"device": device}, rows

    records = {
        "whole": record("NVIDIA H200", "copy", "matmul"),
        "neither": record("NVIDIA H200", "read"),
        "half": record("NVIDIA H100", "copy"),
        "host": record("AMD EPYC"),
    }
    said = plot.without_rates(records)
    assert said.endswith(": copy and matmul: `neither`; matmul: `half`.\n")
    assert plot.without_rates({"whole": records["whole"]}) == ""


def test_a_sweep_times_every_tile_and_stops_in_time(harness: ModuleType, tmp_path: Path) -> None:
    sweep = __import__("tile_sweep")
    sweep.main(["--device", "cpu", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "tile_sweep.jsonl")
    assert len(rows) == 4 and all(row.value and row.error < 1e-2 for row in rows)
    sweep.main(["--device", "cpu", "--out", str(tmp_path), "--small-heads"])
    _, rows = harness.load_rows(tmp_path / "tile_sweep_small_heads.jsonl")
    assert len(rows) == 8 and all(row.value and row.error < 1e-2 for row in rows)
    sweep.main(["--device", "cpu", "--out", str(tmp_path), "--budget", "0"])
    assert harness.load_rows(tmp_path / "tile_sweep.jsonl")[1] == []


def test_rates_are_found_again_in_times_that_they_made(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from warploom.codegen.attention.rates import Rates
    from warploom.codegen.attention.template import Work
    from warploom.codegen.choice.tile_choice import tiles_weighed
    from warploom.codegen.compilers.arch import arch_named

    fitter, sweep = __import__("fit_tiles"), __import__("tile_sweep")
    shipped = fitter.Model.shipped(small_heads=False)
    rates = {
        **shipped.rates,
        "tall": Rates(flops=1.5, launch=12, item=0.028, merge=8),
        "hopper 128": Rates(flops=3.0, launch=10, item=4.2, merge=6.0),
        "hopper 192": Rates(flops=3.5, launch=11, item=6.0, merge=6.0),
    }
    report = harness.Report(sweep.SMALL, CPU, tmp_path)
    report.facts["multiprocessors"] = 132
    for batch in sweep.batches(on_gpu=True, small_heads=True):
        spec = fitter.spec_of(batch.dim)
        work = Work(batch.fused_rows, batch.requests * sweep.KV_HEADS / 132, batch.keys)
        for tile in tiles_weighed(spec, arch_named("sm_90a")):
            if batch.fused_rows > sweep.MOST_TILES * tile.rows:
                continue
            us = replace(shipped, rates=rates).predicted(spec, tile, work)
            params = asdict(batch) | {"fused_rows": batch.fused_rows, "tile": asdict(tile)}
            report.rows.append(
                harness.Row(sweep.SMALL, str(batch), tile.label, us, "us", params=params)
            )
    report.write()
    fitted = fitter.fit(shipped.machine, fitter.load(report.path)).rates
    assert fitted["tall"].flops == pytest.approx(1.5, rel=0.05)
    assert fitted["hopper 128"].flops == pytest.approx(3.0, rel=0.05)
    assert fitted["hopper 192"].item == pytest.approx(6.0, rel=0.15)
    fitter.main([str(report.path)])
    said = capsys.readouterr().out
    assert "after: within 10 %: 100%" in said and "192': Rates(flops=" in said


def test_rates_of_small_heads_are_those_that_the_record_gives(harness: ModuleType) -> None:
    fitter = __import__("fit_tiles")
    shipped = fitter.Model.shipped(small_heads=True)
    batches = fitter.load(harness.RESULTS / "tile_sweep_small_heads.jsonl")
    assert fitter.fit(shipped.machine, batches) == shipped


def test_a_sweep_of_composed_plans_checks_every_tile(harness: ModuleType, tmp_path: Path) -> None:
    sweep = __import__("composed_sweep")
    sweep.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    _, (single, *tiles) = harness.load_rows(tmp_path / "composed_tiles.jsonl")
    assert single.impl == sweep.SINGLE and single.params["single_tile"] and len(tiles) == 2
    assert all(row.value and row.unit == "us" and row.error < 1e-2 for row in (single, *tiles))


def test_a_chunk_beside_decodes_over_a_prefix_is_right_in_all_ways(
    harness: ModuleType, tmp_path: Path
) -> None:
    shared = __import__("shared_mixed")
    shared.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "shared_mixed.jsonl")
    assert [row.impl for row in rows[2:]] == ["one plan", "one tile", "single format"]
    assert all(row.ms > 0 and row.error < 1e-2 for row in rows[2:])


def test_rates_of_composed_plans_are_those_that_the_record_gives(
    harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    fitter = __import__("fit_composed_tiles")
    cases = fitter.load(harness.RESULTS / "composed_tiles.jsonl")
    assert fitter.fit(cases) == fitter.RATES
    fitter.main([])
    assert "after: within 10 %: 100%" in capsys.readouterr().out


def test_a_rate_that_would_be_negative_is_0(harness: ModuleType) -> None:
    fitter = __import__("fit_composed_tiles")
    work = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert np.allclose(fitter.least_squares(work / np.array([[3.0], [4.0], [5.0]])), [2.0, 1.0])
    falling = fitter.least_squares(work / np.array([[5.0], [4.0], [3.0]]))
    assert falling[0] > 3.0 and falling[1] == 0.0


def test_the_truth_notices_a_wrong_mask(harness: ModuleType) -> None:
    batches = __import__("batches")
    inputs = batches.make_inputs(batches.Shape((8, 3), (16, 5), 4, 2, 16, torch.float32), CPU)
    out = torch.empty_like(inputs.q)
    for request, (q, k) in enumerate(((slice(0, 8), 16), (slice(8, 11), 5))):
        keys, values = (inputs.stored(x, request) for x in (inputs.k, inputs.v))
        for head in range(4):
            logits = inputs.q[q, head] @ keys[:, head // 2].T / 4.0
            hidden = torch.ones_like(logits).tril(k - len(logits)) == 0
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            out[q, head] = weights @ values[:, head // 2]
    assert batches.Truth().check(inputs).relative_error(out) < 1e-5
    assert batches.Truth(mask=batches.everything).check(inputs).relative_error(out) > 0.1


@pytest.mark.parametrize("kind", ["constant", "uniform", "zipf", "skew"])
def test_lengths_are_the_same_each_time_and_have_their_mean(harness: ModuleType, kind: str) -> None:
    batches = __import__("batches")
    drawn = batches.lengths(kind, 128, 1024)
    assert drawn == batches.lengths(kind, 128, 1024) and min(drawn) >= 1
    if kind in ("constant", "zipf"):
        assert abs(sum(drawn) / 128 - 1024) < 8


def test_only_the_marked_section_of_the_readme_changes(plot: ModuleType) -> None:
    text = f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter\n"
    replaced = plot.replace_section(text, plot.section(["new"]))
    assert replaced.startswith("before\n") and replaced.endswith("after\n")
    assert "new" in replaced and "old" not in replaced
    with pytest.raises(ValueError, match="benchmarks:begin"):
        plot.replace_section("no markers", "section")


def test_no_results_say_so(plot: ModuleType) -> None:
    assert "No figures are recorded yet" in plot.section([])


def test_the_command_refuses_a_machine_without_gpu(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["prefill.py"])
    with pytest.raises(SystemExit):
        harness.arguments("prefill", [])
    assert "no CUDA device" in capsys.readouterr().err


def test_each_way_to_transform_keys_is_right_where_it_is_small(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_transforms = __import__("key_transforms")
    prefill, decode, *others = key_transforms.contests(on_gpu=False)
    some = [prefill, decode, *others[1::2]]  # others of RoPE, and of other kinds decodes
    monkeypatch.setattr(key_transforms, "contests", lambda on_gpu: some)
    key_transforms.main(["--device", "cpu", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "key_transforms.jsonl")
    assert {row.impl for row in rows} == {"fused", "stored", "plain"}
    assert all(row.value is not None for row in rows), rows


def test_a_limit_ends_the_measurement(harness: ModuleType, tmp_path: Path) -> None:
    key_transforms = __import__("key_transforms")
    key_transforms.main(["--device", "cpu", "--limit", "0", "--out", str(tmp_path)])
    assert not (tmp_path / "key_transforms.jsonl").exists()
