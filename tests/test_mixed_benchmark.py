"""Mixed batches are drawn the same each time, checked by halves, and judged by their goals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def batches(harness: ModuleType) -> ModuleType:
    return __import__("mixed_batches")


@pytest.fixture
def goals(harness: ModuleType) -> ModuleType:
    return __import__("mixed_goals")


# --- batches --------------------------------------------------------------------------------------


def test_the_table_has_the_twelve_batches(batches: ModuleType) -> None:
    names = [one.name for one in batches.table_batches()]
    assert len(set(names)) == 12 and names[0] == "1k/8k/32" and names[-1] == "2k/16k/128"
    shape = batches.table_batches()[0].shape
    assert shape.q_lens == (1024,) + (1,) * 32 and shape.kv_lens == (8192,) * 33
    assert (shape.q_heads, shape.kv_heads, shape.dim, shape.page_size) == (32, 8, 128, 16)
    assert shape.dtype == torch.bfloat16


def test_drawn_batches_are_the_same_however_many_are_drawn(batches: ModuleType) -> None:
    drawn = batches.drawn_batches(64)
    assert drawn[:8] == batches.drawn_batches(8) and len({one.name for one in drawn}) == 64
    for one in drawn:
        assert 256 <= one.chunk <= 4096 and one.chunk <= one.context <= 32768
        assert 8 <= len(one.decodes) <= 256
        assert all(256 <= keys <= 32768 for keys in one.decodes)
    assert {one.heads for one in drawn} == set(batches.HEADS)
    assert {one.chunk_last for one in drawn} == {False, True}
    assert sum(one.kind == "causal" for one in drawn) == 32
    assert {one.kind for one in drawn} == set(batches.KINDS)


def test_as_many_lengths_are_drawn_in_each_octave(batches: ModuleType) -> None:
    keys = [keys for one in batches.drawn_batches(64) for keys in one.decodes]
    octaves = [sum(low <= n < 2 * low for n in keys) / len(keys) for low in (256, 1024, 8192)]
    assert all(abs(part - 1 / 7) < 0.03 for part in octaves), octaves


@pytest.mark.parametrize("chunk_last", [False, True])
def test_halves_have_the_rows_and_pages_of_their_requests(
    batches: ModuleType, chunk_last: bool
) -> None:
    batch = batches.Batch("x", 5, 40, (17, 33, 1), (4, 2), chunk_last=chunk_last, dim=16)
    mixed = batches.make_mixed(batch, CPU)
    chunk = 3 if chunk_last else 0
    decodes = [one for one in range(4) if one != chunk]
    assert mixed.prefill.shape.kv_lens == (40,) and mixed.decode.shape.kv_lens == (17, 33, 1)
    for part, requests in ((mixed.prefill, [chunk]), (mixed.decode, decodes)):
        for number, request in enumerate(requests):
            for cache in (mixed.whole.k, mixed.whole.v):
                assert torch.equal(part.stored(cache, number), mixed.whole.stored(cache, request))
    assert mixed.prefill.q.shape[0] == 5 and mixed.decode.q.shape[0] == 3
    prefill, decode = mixed.parts(mixed.whole.q)
    assert torch.equal(prefill, mixed.prefill.q) and torch.equal(decode, mixed.decode.q)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["causal", "soft-cap", "window"])
def test_the_check_notices_a_wrong_half(batches: ModuleType, kind: str) -> None:
    ours = __import__("mixed_ours")
    batch = batches.tiny(batches.Batch("x", 1024, 131072, (81920,) * 64, kind=kind))
    mixed = batches.make_mixed(batch, CPU)
    check = batches.check_of(batch)(mixed)
    ways = ours.ways(batches.KINDS[kind], on_gpu=False)
    for row, (way,) in ways.items():
        output = way.prepare([mixed])[0]()
        assert check.relative_error(output) < check.tolerance, row
        for part in mixed.parts(output):
            if part is not None:
                kept = part.clone()
                part[-1] = torch.nan
                assert not check.relative_error(output) <= check.tolerance
                part.copy_(kept)
    other = batches.KINDS["causal" if kind != "causal" else "window"]
    wrong = ours.run_one_plan(other, [mixed])[0]()
    assert check.relative_error(wrong) > check.tolerance


# --- harness --------------------------------------------------------------------------------------


def test_a_replay_that_writes_nothing_is_wrong(harness: ModuleType) -> None:
    out = torch.ones(4)
    check = harness.Check(lambda parts: float((parts[0] - 1).abs().max()), 1e-6, of_replays=True)
    harness.check_replay(check, (out, None), lambda: out.fill_(1.0))
    with pytest.raises(harness.WrongReplay, match="replayed"):
        harness.check_replay(check, (out, None), lambda: None)


def test_the_fastest_way_counts_and_is_named(harness: ModuleType) -> None:
    mixed = __import__("mixed")
    rows = [harness.Row("mixed", "a", way, ms, "us", ms=ms) for way, ms in (("x", 2.0), ("y", 1.0))]
    refused = harness.Row("mixed", "a", "z", None, "us", note="n/a: not installed")
    best = mixed.fastest("serial", [refused, *rows])
    assert (best.impl, best.ms, best.params) == ("serial", 1.0, {"kept": "y"})
    absent = mixed.fastest("serial", [refused, refused])
    assert absent.value is None and absent.note == "n/a: not installed" and not absent.params


# --- goals ----------------------------------------------------------------------------------------


def rows_of(harness: ModuleType, case: str, size: tuple[int, int, int], **ms: float) -> list[Any]:
    params = dict(zip(("chunk", "context", "decodes"), size, strict=True))
    names = {name: name.replace("_", " ") for name in ms}
    return [
        harness.Row("mixed", case, names[name], time * 1e3, "us", ms=time, params=params)
        for name, time in ms.items()
    ]


@pytest.mark.parametrize(
    ("size", "alone", "goal"),
    [
        ((1024, 8192, 32), (1.0, 9.0), 1.40),
        ((1024, 8192, 64), (1.0, 1.0), 1.25),
        ((1024, 8192, 128), (1.0, 1.0), 1.12),
        ((2048, 8192, 32), (1.0, 1.0), 1.35),
        ((2048, 8192, 64), (1.0, 1.0), 1.35),
        ((2048, 8192, 128), (1.0, 1.0), 1.15),
        ((2048, 16384, 64), (1.0, 3.0), 1.25),
        ((2048, 16384, 64), (1.0, 3.1), 1.03),
        ((1024, 16384, 32), (3.1, 1.0), 1.03),
        ((1024, 16384, 32), None, None),
    ],
)
def test_each_batch_has_its_goal(
    goals: ModuleType, size: tuple[int, int, int], alone: Any, goal: float | None
) -> None:
    assert goals.goal_of(*size, alone) == goal


def test_speed_ups_are_over_the_fastest_serial_way(harness: ModuleType, goals: ModuleType) -> None:
    times = {"one_plan": 0.35, "two_in_turn": 0.45, "FlashInfer_serial": 0.49,
             "cuDNN_serial": 0.48, "FlashInfer_persistent": 0.1, "prefill_alone": 0.25,
             "decode_alone": 0.2}  # fmt: skip
    (verdict,) = goals.verdicts(rows_of(harness, "1k/8k/32", (1024, 8192, 32), **times))
    assert verdict.serial == (0.45, "two in turn") and verdict.peers == (0.48, "cuDNN serial")
    assert verdict.speed_up == pytest.approx(0.45 / 0.35)
    assert verdict.over_peers == pytest.approx(0.48 / 0.35)
    assert verdict.limit == pytest.approx(0.45 / 0.25)
    assert verdict.rival == (0.1, "FlashInfer persistent")  # no half alone, and no tile of ours
    assert verdict.over_all == pytest.approx(0.1 / 0.35)
    assert verdict.goal == 1.40 and verdict.met is False
    times["two_in_turn"] = 0.50
    (verdict,) = goals.verdicts(rows_of(harness, "1k/8k/32", (1024, 8192, 32), **times))
    assert verdict.serial == (0.48, "cuDNN serial") and verdict.met is False
    times["one_plan"] = 0.34
    (verdict,) = goals.verdicts(rows_of(harness, "1k/8k/32", (1024, 8192, 32), **times))
    assert verdict.met is True


def test_what_was_not_measured_is_not_judged(harness: ModuleType, goals: ModuleType) -> None:
    rows = rows_of(harness, "1k/16k/32", (1024, 16384, 32), one_plan=1.0)
    (verdict,) = goals.verdicts(rows)
    assert verdict.speed_up is None and verdict.met is None and verdict.goal is None
    text = "\n".join(goals.of_table(rows))
    assert "| 1k/16k/32 | 1000 |" in text and "goals are met" not in text


def test_drawn_batches_have_a_mean_and_a_least(harness: ModuleType, goals: ModuleType) -> None:
    rows = [
        row
        for number, gain in enumerate((2.0, 1.0, 0.97))
        for row in rows_of(
            harness, f"{number}: x", (256, 256, 8), one_plan=1.0, FlashInfer_serial=gain
        )
    ]
    text = "\n".join(goals.of_drawn(rows))
    assert f"Geometric mean of 3: {(2 * 0.97) ** (1 / 3):.2f} (goal 1.20: yes)" in text
    assert "least 0.97, 2: x (goal 0.98: no)" in text


def test_each_peer_has_its_mean_and_of_some_the_faster_counts(
    harness: ModuleType, goals: ModuleType
) -> None:
    rows = []
    for case, own, serial, one_call, pod in (("a", 1.5, 4.0, 2.0, 8.0), ("b", 3.0, 2.0, 4.0, 8.0)):
        streams = {"a": 0.96, "b": 5.0}[case]
        peers = {"FlashAttention-3 serial": serial, "FlashAttention-3": one_call}
        rows += rows_of(harness, case, (1, 1, 1), one_plan=1.0, two_in_turn=own, **peers)
        rows += rows_of(harness, case, (1, 1, 1), two_streams=streams, **{"FlashInfer POD": pod})
    lines = goals.of_peers(rows)
    assert "| FlashAttention-3 | 2 | 2.828 | 2.000 | 4.000 |" in lines
    assert "| the better of FlashAttention-3's | 2 | 2.000 | 2.000 | 2.000 |" in lines
    assert "| the better POD of FlashInfer's | 2 | 8.000 | 8.000 | 8.000 |" in lines
    assert "| two in turn, or the fastest peer | 2 | 1.732 | 1.500 | 2.000 |" in lines
    assert "| the fastest of all | 2 | 1.386 | 0.960 | 2.000 |" in lines
    said = "Beside the fastest of all: geometric mean 1.386 (goal 1.20: yes); 1 below 0.98"
    assert f"{said} (goal: none): a (0.960)." in lines


def test_the_record_is_held_against_all_rivals(harness: ModuleType, goals: ModuleType) -> None:
    """The figures of docs/mixed-batches.md."""
    _, rows = harness.load_rows(harness.RESULTS / "mixed_drawn_peers.jsonl")
    lines = goals.of_peers(rows)
    assert "| the fastest of all | 100 | 1.120 | 0.973 | 1.458 |" in lines
    (said,) = (line for line in lines if line.startswith("Beside the fastest of all"))
    assert "1.120 (goal 1.20: no); 2 below 0.98" in said


def test_pure_batches_may_lose_a_hundredth(harness: ModuleType, goals: ModuleType) -> None:
    rows = rows_of(harness, "a", (1, 1, 0), one_plan=1.009, one_tile=1.0)
    rows += rows_of(harness, "b", (1, 1, 0), one_plan=1.02, one_tile=1.0)
    text = "\n".join(goals.of_pure(rows))
    assert "| a | +0.9% | yes |" in text and "| b | +2.0% | no |" in text


def test_plans_that_take_long_are_told(harness: ModuleType, goals: ModuleType) -> None:
    (row,) = rows_of(harness, "a", (1, 1, 0), one_plan=1.0)
    for us, answer in ((40.0, "yes"), (41.0, "no")):
        row.params["plan_us"] = us
        text = "\n".join(goals.of_table([row]))
        assert f"at most {us:.0f} us of the host (goal 40: {answer})" in text


# --- the whole ------------------------------------------------------------------------------------


def test_every_table_is_right_where_it_is_small(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed, plot = __import__("mixed"), __import__("plot")
    mixed.main(["--device", "cpu", "--tiny", "--quick", "--drawn", "2", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "one tile: cpu" in said and "Geometric mean of 2" in said
    for table in mixed.TABLES:
        machine, rows = harness.load_rows(tmp_path / f"{table}.jsonl")
        assert {row.impl for row in rows if row.case == "ceiling"} >= {"matmul 512^3"}
        ours = [row for row in rows if row.impl in plot.WAYS]
        assert ours and all(row.value is not None for row in ours), ours
        peers = [row for row in rows if row.case != "ceiling" and row not in ours]
        assert all(row.note.startswith("n/a: ") for row in peers)
        assert bool(peers) == (table in ("mixed", "mixed_drawn"))
        text = plot.markdown(table, machine, rows)
        assert (
            "In the same run: " in text and "copy of 32 MiB" in text and plot.TITLES[table] in text
        )
        pytest.importorskip("matplotlib")
        picture = tmp_path / f"{table}.png"
        plot.draw(table, machine, rows, picture)
        assert picture.stat().st_size > 5_000
    one_plans = [
        row for row in harness.load_rows(tmp_path / "mixed.jsonl")[1] if row.impl == "one plan"
    ]
    assert all(row.params["way"] and row.params["plan_us"] > 0 for row in one_plans)


def test_a_limit_and_names_narrow_the_run(harness: ModuleType, tmp_path: Path) -> None:
    mixed = __import__("mixed")
    command = ["--device", "cpu", "--tiny", "--quick", "--tables", "mixed", "--out", str(tmp_path)]
    mixed.main([*command, "--only", "one plan"])
    _, rows = harness.load_rows(tmp_path / "mixed.jsonl")
    assert {row.impl for row in rows if row.case != "ceiling"} == {"one plan"}
    mixed.main([*command, "--limit", "0"])
    _, rows = harness.load_rows(tmp_path / "mixed.jsonl")
    assert rows and all(row.case == "ceiling" for row in rows)


def test_pages_are_padded_for_peers_that_want_a_rectangle(batches: ModuleType) -> None:
    peers = __import__("peers_upstream")
    batch = batches.Batch("x", 5, 40, (17, 33, 1), (4, 2), dim=16)
    part = batches.make_mixed(batch, CPU).decode
    padded = peers.padded_pages(part)
    assert padded.shape == (3, 3) and padded.dtype == torch.int32
    for row, length in enumerate(part.shape.kv_lens):
        pages = padded[row, : -(-length // 16)].to(torch.int64)
        kept = part.k[pages].flatten(0, 1)[:length]
        assert torch.equal(kept, part.stored(part.k, row))
