"""Graph pools on the host's twin: what comes out is what the step gives eagerly."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.graph_errors import NoSuchMode
from warploom.serving.graphs.host_driver import HostDriver

TOKENS, WIDTH, MOST = 40, 8, 12
BOUNDS = wl.Bounds(max_requests=MOST, max_q_rows=MOST, max_kv_len=64)
INPUTS = {"tokens": wl.GraphInput(torch.int64), "scales": wl.GraphInput(torch.float32, (2,), 1.0)}


class Model:
    """Three functions; the middle one stands for attention."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(TOKENS, WIDTH, generator=generator)
        self.inner, self.outer = (torch.randn(WIDTH, WIDTH, generator=generator) for _ in "io")
        self.calls: list[int] = []  # rows that the middle was called with

    def first(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table[tokens]
        return (x @ self.inner).relu_(), x

    def middle(
        self, h: torch.Tensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(len(h))
        return x * scales[:, :1] + scales[:, 1:], h  # in the other order, and one as it came

    def last(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = h @ self.outer + x
        return out, out.argmax(-1)

    def expected(self, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Row by row, so that no row can know of another."""
        found = []
        for token, scale in zip(batch["tokens"], batch["scales"], strict=True):
            x = self.table[token][None]
            h = torch.relu(x @ self.inner)
            out = h @ self.outer + x * scale[0] + scale[1]
            found.append((out[0], out[0].argmax()))
        return found

    def pool(self, **options: Any) -> wl.GraphPool:
        step: list[Any] = [self.first, wl.GraphPiece(self.middle, "full"), self.last]
        return wl.GraphPool(step, INPUTS, BOUNDS, device="cpu", **options)


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, TOKENS, (rows,), generator=generator),
        "scales": torch.randn(rows, 2, generator=generator),
    }


def check(model: Model, pool: wl.GraphPool, batch: dict[str, torch.Tensor], **call: Any) -> None:
    out, best = pool.run(batch, **call)
    assert len(out) == len(best) == len(batch["tokens"])
    for row, (wanted, wanted_best) in enumerate(model.expected(batch)):
        torch.testing.assert_close(out[row], wanted, atol=1e-4, rtol=1e-4)
        assert best[row] == wanted_best


modes = st.sampled_from([None, "full", "partial", "eager"])
calls = st.lists(st.tuples(st.integers(1, MOST), modes, st.integers(0, 99)), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(calls, st.sampled_from([None, 6_000, 20_000]), st.sampled_from([None, (3, 7), (1, 2, 12)]))
def test_any_sequence_of_batches_gives_what_the_step_gives(
    calls: list[tuple[int, str | None, int]], max_bytes: int | None, buckets: tuple[int, ...] | None
) -> None:
    """Other captures' replays spoil intermediate results, and budgets evict in between."""
    model = Model()
    with model.pool(max_bytes=max_bytes, buckets=buckets, on_failure="eager") as pool:
        for rows, mode, seed in calls:
            asked = mode if mode in servable(pool, rows) else None
            check(model, pool, batch_of(rows, seed), mode=asked)
            stats = pool.stats()
            assert max_bytes is None or stats.shared_bytes + stats.own_bytes <= max_bytes
        assert sum(pool.stats().runs.values()) == len(calls)
        assert pool.stats().rows == sum(rows for rows, *_ in calls)


def servable(pool: wl.GraphPool, rows: int) -> list[str]:
    found = ["eager"]
    for mode in ("full", "partial"):
        try:
            pool.choose(rows, mode)
        except NoSuchMode:
            continue
        found.append(mode)
    return found


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_a_bucket_is_captured_once_and_its_inputs_are_rewritten(mode: str) -> None:
    model = Model()
    pool = model.pool(buckets=[8])
    for seed, rows in enumerate((5, 8, 1, 7, 5)):
        check(model, pool, batch_of(rows, seed), mode=mode)
    stats = pool.stats()
    assert stats.captures == 1 and stats.captured == ((mode, 8),)
    assert stats.padding_rows == 3 + 0 + 7 + 1 + 3
    # a graph asks Python for nothing when it is replayed; between graphs it is asked each time
    assert model.calls == [8] * (2 if mode == "full" else 1 + 5)


def test_rows_choose_the_mode() -> None:
    pool = Model().pool(buckets=[2, 4, 8], full_rows=2, partial_rows=5)
    chosen = {rows: pool.choose(rows) for rows in range(1, MOST + 1)}
    assert [chosen[n].mode for n in (1, 2, 3, 5)] == ["full", "full", "partial", "partial"]
    assert all(chosen[n].mode == "eager" for n in (6, 7, 8, 9, 12))
    assert [chosen[n].padded_rows for n in (1, 2, 3, 5, 6, 12)] == [2, 2, 4, 8, 6, 12]
    assert "full_rows is 2" in chosen[3].reason and "largest bucket" in chosen[12].reason
    assert pool.choose(8, "full").mode == "full"  # a limit is a wish


def test_default_buckets_are_powers_of_two_and_the_most() -> None:
    assert Model().pool().buckets == (1, 2, 4, 8, 12)


def test_pieces_choose_the_modes_that_there_are() -> None:
    model = Model()
    step: list[Any] = [model.first, wl.GraphPiece(model.middle, "never"), model.last]
    pool = wl.GraphPool(step, INPUTS, BOUNDS, device="cpu")
    assert pool.choose(3).mode == "partial" and "never captured" in pool.choose(3).reason
    check(model, pool, batch_of(3))
    whole = wl.GraphPool(lambda tokens: model.table[tokens], INPUTS, BOUNDS, device="cpu")
    with pytest.raises(NoSuchMode, match="full mode"):
        whole.choose(3, "partial")
    batch = batch_of(3)
    assert torch.equal(whole.run(batch), model.table[batch["tokens"]])  # one tensor, no tuple


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_rows_of_padding_are_as_declared_whatever_was_there_before(mode: str) -> None:
    def total(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sum().expand(len(numbers))

    inputs = {"numbers": wl.GraphInput(torch.int64, pad=100)}
    step: list[Any] = [total, wl.GraphPiece(torch.clone, "full")]
    pool = wl.GraphPool(step, inputs, BOUNDS, device="cpu", buckets=[2, 8])
    for rows in (8, 3, 2, 1, 7):
        out = pool.run({"numbers": torch.arange(rows)}, mode=mode)
        padding = pool.choose(rows).padded_rows - rows
        assert out.tolist() == [sum(range(rows)) + 100 * padding] * rows


@pytest.mark.parametrize("inside", [True, False])
def test_batches_come_in_and_outside_of_inference_mode(inside: bool) -> None:
    with torch.inference_mode(inside):
        model = Model()
        pool = model.pool()
    for turn in (inside, not inside, inside):
        with torch.inference_mode(turn):
            check(model, pool, batch_of(3))
    assert pool.stats().captures == 1


def test_what_lies_at_its_address_may_be_rewritten() -> None:
    model = Model()
    pool = model.pool()
    check(model, pool, batch_of(4))
    model.outer.mul_(-2.0)
    model.table.add_(1.0)
    check(model, pool, batch_of(4))
    assert pool.stats().captures == 1


def test_warm_up_captures_all_buckets_from_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    pool = model.pool(buckets=[2, 5, 9])
    prepared: list[int] = []
    assert pool.warm_up(prepared.append, progress=True) == 3
    assert prepared == [9, 5, 2]
    assert "3/3" in capsys.readouterr().err
    assert pool.stats().captures == 3
    assert pool.warm_up(prepared.append, progress=False) == 3 and len(prepared) == 3
    check(model, pool, batch_of(5, 2))
    assert pool.stats().captures == 3


def test_warm_up_waits_for_other_streams_and_leaves_inputs_alone_that_it_does_not_need() -> None:
    class Driver(HostDriver):
        def order(self) -> None:
            made.append("order")

        def rehearse(self, body: Any) -> None:
            made.append("rehearse")
            super().rehearse(body)

    made: list[str] = []
    pool = wl.GraphPool(
        lambda scales: scales, INPUTS, BOUNDS, device="cpu", buckets=[2], driver=Driver()
    )
    pool.warm_up()
    assert made == ["order", "rehearse"]
    pool.run(batch_of(2))
    before = {name: x.clone() for name, x in pool._inputs.buffers.items()}
    pool.warm_up()
    assert made == ["order", "rehearse", "order", "order"]
    assert all(torch.equal(x, before[name]) for name, x in pool._inputs.buffers.items())


def test_modules_are_steps_and_gradients_are_not_recorded() -> None:
    class Doubling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 2.0))

        def forward(self, scales: torch.Tensor) -> torch.Tensor:
            return scales * self.weight

    pool = wl.GraphPool(Doubling(), INPUTS, BOUNDS, device="cpu")
    batch = batch_of(3)
    for _ in range(2):
        out = pool.run(batch)
        assert isinstance(out, torch.Tensor) and not out.requires_grad
        assert torch.equal(out, batch["scales"] * 2)


def test_statistics_are_a_table() -> None:
    from rich.console import Console

    pool = Model().pool()
    pool.run(batch_of(3))
    console = Console(record=True, width=60, file=StringIO())
    console.print(pool.stats())
    assert "batches, full" in console.export_text()
    assert repr(pool) == "GraphPool(1 captures for 5 buckets on cpu)"
