"""Batches planned as the one before, in few calls, get the plans of the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.on_gpu import Lengths, OnGpu, arguments, same_plans
from support.parts import compiled, page_tables
from support.sampling import few
from torch._subclasses.fake_tensor import FakeTensorMode

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.errors import NotPlanned, WarploomError, WrongCall, WrongShape
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.strategies.host_strategy import HostStrategy
from warploom.runtime.strategies.strategy import Planned
from warploom.scheduler.plans.verify import verify

BOUNDS = wl.Bounds(max_requests=40, max_q_rows=4000, max_kv_len=9000, max_blocks=4000)
MIXED = wl.Bounds(max_requests=100, max_q_rows=2200, max_kv_len=9000, max_blocks=20_000)
ONE = TileConfig(16, 64)
TWO = TileConfig(16, 64, decode=TileConfig(4, 64))
ROWS = st.sampled_from([0, 1, 1, 1, 2, 5, 16, 17, 65, 300, 900])
KEYS = st.one_of(st.integers(0, 70), st.integers(0, 9000))


@st.composite
def steps(draw: st.DrawFn) -> list[Lengths]:
    """Batches of which most differ little from the one before."""
    batch = draw(st.lists(st.tuples(ROWS, KEYS), max_size=12))
    found = [batch]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["longer", "longer", "another row", "joins", "leaves", "new"]))
        if kind == "new":
            batch = draw(st.lists(st.tuples(ROWS, KEYS), max_size=12))
        elif kind == "longer":
            more = draw(st.sampled_from([1, 1, 16, 500]))
            batch = [(rows, keys + more) for rows, keys in batch]
        elif kind == "joins":
            batch = [*batch, (draw(ROWS), draw(KEYS))]
        elif batch and kind == "leaves":
            batch = batch[1:]
        elif batch:
            at = draw(st.integers(0, len(batch) - 1))
            batch = [*batch[:at], (draw(ROWS), batch[at][1]), *batch[at + 1 :]]
        found.append(batch)
    return found


def spoiled(draw: Any, batch: Arguments) -> Arguments:
    """The same, now and then with a number that is wrong."""
    if draw(st.integers(0, 5), label="spoils") or not len(batch.qo_indptr) > 1:
        return batch
    arrays = [x.clone() if x is not None else None for x in batch[:4]]
    array = draw(st.sampled_from([x for x in arrays if x is not None and len(x)]))
    array[draw(st.integers(0, len(array) - 1))] = draw(st.sampled_from([-1, 0, 17, 2**30]))
    return Arguments(*arrays)


@pytest.mark.parametrize("heads", [(8, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Paged(16)], ids=["ragged", "paged"])
@pytest.mark.parametrize("bounds", [None, BOUNDS, MIXED], ids=["any size", "bounds", "mixed"])
@settings(max_examples=few(15, of=60), deadline=None)
@given(data=st.data())
def test_a_gpu_gets_the_plans_of_the_long_way(
    heads: tuple[int, int], kv_format: KVFormat, bounds: wl.Bounds | None, data: st.DataObject
) -> None:
    variant = data.draw(st.sampled_from([wl.Causal(), wl.Causal() & wl.SlidingWindow(500)]))
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1]}
    if bounds is MIXED:  # one kernel of two roles for all
        sizes["cuda_graph"] = True
    with pytest.MonkeyPatch.context() as patched:
        short, long = (
            OnGpu(patched, variant=variant, kv_format=kv_format, bounds=bounds, **sizes)
            for _ in range(2)
        )
        for at, lengths in enumerate(data.draw(steps())):
            batch = spoiled(data.draw, arguments(lengths, kv_format, at))
            results = []
            for made, is_short in ((short, True), (long, False)):
                try:
                    results.append(made.plan(batch, is_short)[0])
                except WarploomError as error:
                    results.append((type(error), str(error)))
            if isinstance(results[0], Planned) and isinstance(results[1], Planned):
                same_plans(*results)
            else:
                assert results[0] == results[1]
                short.planner._strategies[1].forget()  # as wrappers ask for no other then


def test_a_server_plans_again_what_is_like_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And another choice of tile where that changes: the halves that two roles need."""
    kv_format = wl.Paged(16)
    made = OnGpu(monkeypatch, variant=wl.Causal(), kv_format=kv_format)
    decodes = [(1, 5000 + 10 * i) for i in range(30)]
    longer = [(1, keys + 1) for _, keys in decodes]
    mixed, later = [(900, 900), *decodes], [(800, 1700), *longer]
    alone, too_long, many = [(900, 900), (1, 20)], [(900, 3000)], [(1, 60_000)] * 30
    expected = [
        (decodes, False, False), (longer, False, False),  # which is what the next may be like
        (decodes, True, False), (longer, True, False), (decodes[1:], False, False),
        (mixed, False, True), (later, False, True), (later[:-3], True, True), (mixed, True, True),
        (alone, False, False), (decodes, False, False), (many, False, False), (many, False, False),
        (decodes, False, False), (too_long, False, False),
    ]  # fmt: skip
    for lengths, is_short, has_roles in expected:
        planned, was_short = made.plan(arguments(lengths, kv_format), True)
        assert was_short is is_short, lengths
        assert bool(planned.choice.tile.of_roles) is has_roles


def test_few_prefills_are_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones to each CTA; pieces that level them are claimed beside decodes."""
    kv_format = wl.Paged(16)
    made = OnGpu(
        monkeypatch, variant=wl.Causal(), kv_format=kv_format, bounds=MIXED, cuda_graph=True
    )
    prompts, chunks, decodes = [(100, 100)] * 16, [(420, 8000)] * 5, [(1, 9000)] * 20
    for lengths, claimed in ((prompts, False), (chunks, False), ([*chunks, *decodes], True)):
        for at in range(3):
            planned, _ = made.plan(arguments(lengths, kv_format, at), True)
            plan = planned.plan
            slots = plan.items["slot"][plan.role == 0]
            pieces = (slots >= 0) & ~np.isin(slots, plan.merges["first_slot"])
            assert plan.num_shared_prefills == (pieces.sum() if claimed else 0)
            assert pieces.sum() < 132 and (lengths is prompts or pieces.any())
            verify(plan, planned.visibility)


def wrapper(kv_format: KVFormat, **options: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(
        wl.Causal() & wl.SoftCap(20.0), num_q_heads=4, num_kv_heads=2, head_dim=16,
        dtype="float32", kv_format=kv_format, device="cpu", **options,
    )  # fmt: skip


@pytest.mark.parametrize("tile", [None, TWO, ONE], ids=["any", "two", "one"])
@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Paged(16)], ids=["ragged", "paged"])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["any size", "bounds"])
@settings(max_examples=few(8, of=25), deadline=None)
@given(data=st.data())
def test_a_cpu_gets_the_plans_of_the_long_way(
    tile: TileConfig | None, kv_format: KVFormat, bounds: wl.Bounds | None, data: st.DataObject
) -> None:
    short, long = (wrapper(kv_format, tile=tile, bounds=bounds) for _ in range(2))
    compiled(long).planner.replan = lambda *_: None  # type: ignore[method-assign]
    for at, lengths in enumerate(data.draw(steps())):
        batch = spoiled(data.draw, arguments(lengths, kv_format, at))
        results: list[Any] = []
        for made in (short, long):
            try:
                made.plan(*batch[:4])
                results.append(None)
            except WarploomError as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]
        assert (short.planned is None) is (long.planned is None)
        if short.planned is not None and long.planned is not None:
            same_plans(short.planned, long.planned)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plan was made in few calls, as long as those are asked for."""
    told: list[bool] = []
    replan = HostStrategy.replan

    def asked(self: HostStrategy, *args: Any) -> Planned | None:
        planned = replan(self, *args)
        told.append(planned is not None)
        return planned

    monkeypatch.setattr(HostStrategy, "replan", asked)
    return told


def test_runs_behind_such_plans_are_those_of_the_new_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = spied(monkeypatch)
    kv_format, made = wl.Paged(16), wrapper(wl.Paged(16), tile=TWO)
    for step in range(4):
        batch = arguments([(1, 40 + step), (30, 90 + step), (1, 5 + step)], kv_format, step)
        generator = torch.Generator().manual_seed(step)
        q = torch.randn(32, 4, 16, generator=generator)
        k, v = torch.randn(2, 30, 16, 2, 16, generator=generator)
        made.plan(*batch[:4])
        fresh = wrapper(kv_format, tile=TWO)
        fresh.plan(*batch[:4])
        torch.testing.assert_close(made.run(q, (k, v)), fresh.run(q, (k, v)), rtol=0, atol=0)
    assert told == [False, True, True]


def test_what_looks_at_batches_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told = spied(monkeypatch)
    one = [(1, 40), (1, 50)]
    plain, batch = wrapper(wl.Paged(16), tile=TWO), arguments(one, wl.Paged(16))
    options: list[dict[str, Any]] = [{}, {"cap": 5.0}, {}, {"q_rows": 2}, {}]
    for more in options:
        plain.plan(*batch[:4], **more)
    assert told == [True, False, True]  # with an input nobody asks
    assert plain._inputs.scalars["cap"] == 5.0
    told.clear()
    with pytest.raises(WarploomError):
        plain.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len + 16)
    with pytest.raises(WarploomError):
        plain.run(torch.zeros(2, 4, 16), torch.zeros(2, 9, 16, 2, 16).unbind())
    plain.plan(*batch[:4])  # anew, since there is none
    assert told == [False]
    told.clear()
    ragged = arguments(one, wl.Ragged())
    lists = [x.tolist() for x in ragged[:2]]
    other = wrapper(wl.Ragged())
    for _ in range(2):
        other.plan(*lists)
    assert told == [False]  # lists lie elsewhere each time
    told.clear()
    other.plan(*(x.numpy() for x in ragged[:2]))
    assert told == [True]


class Followed(wl.Variant):
    """A tensor with an entry for each request, which a batch may outgrow."""

    bias = wl.Tensor("float32", ("batch",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.batch]


def test_tensors_are_held_against_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = spied(monkeypatch)
    made = wl.AttentionWrapper(
        Followed(bias=torch.zeros(2)), num_q_heads=2, head_dim=16, dtype="float32",
        kv_format=wl.Ragged(), device="cpu", tile=TWO,
    )  # fmt: skip
    for lengths in ([(1, 3), (1, 4)], [(1, 4), (1, 5)]):
        made.plan(*arguments(lengths, wl.Ragged())[:2])
    with pytest.raises(WrongShape, match="bias"):
        made.plan(*arguments([(1, 4)] * 3, wl.Ragged())[:2])
    assert not any(told)


def test_prefetched_pages_are_those_of_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    told = spied(monkeypatch)
    made, batch = wrapper(wl.Paged(16)), arguments([(1, 40), (1, 50)], wl.Paged(16))
    cache = torch.zeros(7, 2, 16, 2, 16)
    for _ in range(3):
        made.plan(*batch[:4])
    assert told == [False, True]
    made.prefetch(cache, 1 << 20)
    for _ in range(2):
        made.plan(*batch[:4])
        assert all(pages.planned is made.planned for pages in page_tables(made))
    assert told == [False, True]


def test_who_else_plans_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, or NumPy, may plan with other values of inputs into the same memory."""
    kv_format = wl.Paged(16)
    made = OnGpu(monkeypatch, variant=wl.SlidingWindow(50), kv_format=kv_format)
    planner, batch = made.planner, arguments([(1, 5000)] * 9, kv_format)

    def steady() -> None:
        for _ in range(2):
            made.plan(batch, True)
        assert planner.replan(batch) is not None

    steady()
    planner.plan(make_batch(kv_format, *batch[:4]), made.inputs)
    assert planner.replan(batch) is None
    steady()
    on_device: Any = object()
    monkeypatch.setattr(planner._strategies[0], "read", lambda _: on_device)
    assert planner.read(batch) is on_device
    assert planner.replan(batch) is None


@pytest.mark.parametrize("names", [{}, {"paged_kv_indptr": [0, 3]}], ids=str)
def test_a_call_that_does_not_fit_leaves_no_plan(names: dict[str, Any]) -> None:
    """Else the next run would serve the batch before."""
    made, batch = wrapper(wl.Paged(16)), arguments([(1, 40)], wl.Paged(16))
    made.plan(*batch[:4])
    with pytest.raises(WrongCall):
        made.plan(batch.qo_indptr, **names)
    with pytest.raises(NotPlanned, match="refused"):
        made.run(torch.zeros(1, 4, 16), torch.zeros(2, 4, 16, 2, 16).unbind())


def test_nobody_sees_what_the_log_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "warploom")
    made, batch = wrapper(wl.Paged(16)), arguments([(1, 40)], wl.Paged(16))
    arrays = [x.numpy() for x in batch[:4]]
    for _ in range(3):
        with FakeTensorMode():
            made.plan(*arrays)
        assert made.planned is not None
