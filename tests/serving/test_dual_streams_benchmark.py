"""The benchmark of two streams runs, small and on the CPU, and computes the same in all ways."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from warploom.serving.simulation.comparisons import step_seconds
from warploom.serving.simulation.costs import Section
from warploom.simulate import DualStreams, Serial

CPU = torch.device("cpu")


@pytest.fixture
def benchmark(harness: ModuleType) -> Any:
    return import_module("dual_streams")


def test_each_way_has_its_row_and_its_simulated_step(
    harness: ModuleType, benchmark: Any, tmp_path: Path
) -> None:
    benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "dual_streams_cpu.jsonl")
    assert [(row.case, row.impl) for row in rows] == [
        (shape.name, way) for shape in benchmark.TINY for way in benchmark.WAYS
    ]
    for row in rows:
        assert row.value is not None and row.error < 1e-5, row
        parts = row.params["parts_us"]
        assert len(parts) == (1 if row.impl == "one stream" else 2)
        computed = sum(part["attention"] + part["experts"] for part in parts)
        moved = sum(part["dispatch"] + part["combine"] for part in parts)
        a_layer = 1e3 * row.params["simulated_ms"] / row.params["layers"]
        if row.impl == "one stream":
            assert a_layer == pytest.approx(computed + moved, rel=1e-3)
        else:  # no stream can be faster than all that it has to do
            assert max(computed, moved) * 0.999 <= a_layer <= (computed + moved) * 1.001


def test_halves_are_cut_as_the_simulator_cuts_them(benchmark: Any) -> None:
    """The second half of a chunk sees the first; halves of decodes are requests."""
    decode, chunk = benchmark.SHAPES
    halves = [half.batches[0] for half in chunk.step.micro(2)]
    assert [(one.rows, one.pieces[0].keys) for one in halves] == [(1024, 3072), (1024, 4096)]
    assert [len(half.batches[0].pieces) for half in decode.step.micro(2)] == [32, 32]


def test_what_is_hidden_follows_from_the_parts(benchmark: Any) -> None:
    """By hand: transfers of one half beside the other's computation, but for the very last."""
    shape = benchmark.TINY[0]
    whole, halves = shape.step, shape.step.micro(2)

    def sections(compute: float, move: float) -> tuple[Section, ...]:
        names = ("attention", "dispatch", "experts", "combine")
        return tuple(
            Section(name, "communication" if i % 2 else "compute", move if i % 2 else compute)
            for i, name in enumerate(names)
        )

    measured = {whole.batches[0]: sections(4.0, 2.0)}
    measured |= {half.batches[0]: sections(2.0, 1.0) for half in halves}
    costs = benchmark.PartCosts((), layers=shape.layers, measured=measured)
    assert step_seconds(Serial(), costs, whole) == shape.layers * 12.0
    assert step_seconds(DualStreams(), costs, whole) == shape.layers * 8.0 + 1.0


def test_a_half_that_computes_something_else_is_no_figure(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benchmark.Bench(benchmark.TINY[1], CPU, 1)
    assert bench.row("x", "one stream").value is not None
    mlp = benchmark.Part.mlp
    monkeypatch.setattr(benchmark.Part, "mlp", lambda part, x, layer: 2 * mlp(part, x, layer))
    wrong = bench.row("x", "two streams")
    assert wrong.value is None and wrong.note.startswith("wrong")
