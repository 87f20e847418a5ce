"""Several threads on one wrapper, one appender and `attention`; forks while others run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.interrupts import interrupted_at
from support.parts import compiled

import warploom as wl
from warploom.errors import InUse, NotPlanned, UnknownInput
from warploom.runtime.launching.launch import Launcher
from warploom.runtime.wrappers.guard import Guard
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.runtime.wrappers.planning import BatchPlanner
from warploom.runtime.wrappers.running import Runner

ROWS, KEYS, HEADS, DIM = 48, 192, 4, 32


def hammer(*works: Callable[[], None]) -> None:
    """Do all of it at the same time, each in a thread of its own; raise the first error."""
    start, errors = threading.Barrier(len(works)), list[BaseException]()

    def one(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def planned(variant: Any = None, **options: Any) -> wl.AttentionWrapper:
    made = wl.AttentionWrapper(
        wl.Causal() if variant is None else variant, num_q_heads=HEADS, head_dim=DIM,
        dtype="float32", device="cpu", **options,
    )  # fmt: skip
    made.plan([0, ROWS], [0, KEYS])
    return made


def tensors(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, KEYS, HEADS, DIM, generator=generator)
    return q, k, v


@pytest.mark.parametrize("backend", [None, "reference"])
def test_runs_of_several_threads_are_those_of_one(backend: str | None) -> None:
    wrapper = planned(backend=backend)
    given = [tensors(seed) for seed in range(4)]
    expected = [wrapper.run(q, (k, v), return_lse=True) for q, k, v in given]

    def work(at: int) -> None:
        q, k, v = given[at]
        for turn in range(60 if backend is None else 3):
            # other forms and strides, so that tensors are also looked at anew
            keys = k.transpose(0, 1).contiguous().transpose(0, 1) if turn % 3 == at % 3 else k
            out, lse = wrapper.run(q, (keys, v), return_lse=True)
            assert torch.equal(out, expected[at][0]) and torch.equal(lse, expected[at][1])
            if turn % 2:
                assert torch.equal(wrapper.run(q, (k, v)), expected[at][0])

    hammer(*[lambda at=at: work(at) for at in range(4)])  # type: ignore[misc]


@contextmanager
def held_up(wrapper: wl.AttentionWrapper) -> Iterator[threading.Event]:
    """Another thread's run, that does not end before the event is set."""
    inside, go_on = threading.Event(), threading.Event()
    launcher: Any = compiled(wrapper).launcher
    enqueue = launcher._enqueue

    def slow(stream: int) -> None:
        inside.set()
        assert go_on.wait(30)
        enqueue(stream)

    launcher._enqueue = slow
    q, k, v = tensors(0)
    thread = threading.Thread(target=lambda: wrapper.run(q, (k, v)))
    thread.start()
    assert inside.wait(30)
    launcher._enqueue = enqueue
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()


def test_a_plan_does_not_go_under_another_threads_run() -> None:
    wrapper = planned()
    q, k, v = tensors(1)
    expected = wrapper.run(q, (k, v))
    with (
        held_up(wrapper),
        pytest.raises(InUse, match=r"AttentionWrapper is in use by a run .* one of its own"),
    ):
        wrapper.plan([0, 1], [0, KEYS])
    assert torch.equal(wrapper.run(q, (k, v)), expected)  # the plan before stays


def test_a_run_waits_for_another_threads_run() -> None:
    wrapper = planned()
    q, k, v = tensors(1)
    expected = wrapper.run(q, (k, v))
    found: list[torch.Tensor] = []
    with held_up(wrapper) as go_on:
        waiting = threading.Thread(target=lambda: found.append(wrapper.run(q, (k, v))))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and not found
        go_on.set()
        waiting.join()
    assert torch.equal(found[0], expected)


class Calls:
    """A value of a field whose export calls something in the middle of a run or plan."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._values = call, torch.rand(HEADS)

    def __dlpack__(self, **options: Any) -> Any:
        self._call()
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


def test_no_call_begins_inside_of_another_one() -> None:
    wrapper = planned(wl.Alibi("input"))
    q, k, v = tensors(1)
    slopes = torch.rand(HEADS)
    expected = wrapper.run(q, (k, v), slopes=slopes)
    run = Calls(lambda: wrapper.run(q, (k, v), slopes=slopes))
    with pytest.raises(InUse, match="of this very thread"):
        wrapper.run(q, (k, v), slopes=run)
    plan = Calls(lambda: wrapper.plan([0, 1], [0, 1]))
    with pytest.raises(InUse, match="of this very thread"):
        wrapper.run(q, (k, v), slopes=plan)
    assert torch.equal(wrapper.run(q, (k, v), slopes=slopes), expected)
    with pytest.raises(InUse, match="of this very thread"):
        wrapper.plan([0, ROWS], [0, KEYS], slopes=run)
    wrapper.plan([0, ROWS], [0, KEYS], slopes=slopes)
    assert torch.equal(wrapper.run(q, (k, v)), expected)


def test_a_run_that_waited_does_not_take_a_later_plan() -> None:
    class Owner:
        def torn(self) -> None: ...

    guard = Guard("AttentionWrapper", Owner().torn)
    assert guard.try_enter(False)
    errors: list[InUse] = []

    def ask() -> None:
        try:
            guard.wait()
        except InUse as error:
            errors.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    guard._plans += 1  # as `enter_plan` does between the two
    guard.leave()
    waiting.join()
    assert len(errors) == 1
    assert guard.try_enter(False)  # nobody has the turn


@pytest.mark.parametrize("call", ["plan", "run"])
def test_an_interrupt_anywhere_leaves_a_wrapper_that_can_be_used(call: str) -> None:
    """Between taking the turn and the block that gives it back, and behind that, too."""
    wrapper = planned()
    q, k, v = tensors(1)
    expected = wrapper.run(q, (k, v))
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: wrapper.plan([0, ROWS], [0, KEYS]), "run": lambda: wrapper.run(q, (k, v)),
    }  # fmt: skip
    within = Guard, PlanState, BatchPlanner, Runner, Launcher, type(wrapper)
    lost = step = 0
    for step in range(10**4):
        with interrupted_at(step, *within) as came:
            calls[call]()
        lost += wrapper._state.guard.is_mine()
        try:  # there is no plan if the interrupt came within one
            found = wrapper.run(q, (k, v))
        except NotPlanned:
            wrapper.plan([0, ROWS], [0, KEYS])
            found = wrapper.run(q, (k, v))
        assert torch.equal(found, expected) and not wrapper._state.guard.is_mine()
        if not came:
            break
    assert 0 < lost < step


def test_no_run_serves_the_batch_before_a_refused_plan_whose_refusal_was_interrupted() -> None:
    wrapper = planned()
    q, k, v = tensors(1)
    within = type("Within", (), {"anew": BatchPlanner._plan_anew, "forget": PlanState.forget})
    for step in range(10**3):
        wrapper.plan([0, ROWS], [0, KEYS])
        wrapper.run(q, (k, v))
        with interrupted_at(step, within) as came, contextlib.suppress(UnknownInput):
            wrapper.plan([0, ROWS], [0, KEYS], wrong=1)
        with pytest.raises(NotPlanned, match="refused, or interrupted"):
            wrapper.run(q, (k, v))
        if not came:
            return
    raise AssertionError("there was always something to interrupt")


def test_threads_may_call_attention_and_append() -> None:
    variants = [wl.Causal(), wl.Alibi(torch.rand(HEADS)), wl.SlidingWindow(7), None]
    given = [[x[None] for x in tensors(seed)] for seed in range(4)]
    expected = [wl.attention(*x, variant=y) for x, y in zip(given, variants, strict=True)]
    caches = [torch.zeros(4, 2, 16, HEADS, DIM) for _ in given]
    shared = wl.Appender(
        kv_format=wl.Paged(16), num_kv_heads=HEADS, head_dim=DIM, dtype="float32", device="cpu"
    )
    common = torch.zeros(16, 2, 16, HEADS, DIM)  # four pages for each thread

    def work(at: int) -> None:
        _, k, v = (x[0] for x in given[at])
        for turn in range(20):
            keys = KEYS if turn % 2 else KEYS - at  # plans change
            lens = torch.tensor([keys], dtype=torch.int32)
            out = wl.attention(*given[at], variant=variants[at], kv_lens=lens)
            assert keys != KEYS or torch.equal(out, expected[at])
            rows = 1 + (turn + at) % 16
            for append, cache, page in ((wl.append, caches[at], 3), (shared, common, 4 * at + 1)):
                append(k[:rows], v[:rows], cache, [0, rows], [0, 1], [page], [rows])
                assert torch.equal(cache[page, 0, :rows], k[:rows])
                assert torch.equal(cache[page, 1, :rows], v[:rows])

    hammer(*[lambda at=at: work(at) for at in range(4)])  # type: ignore[misc]


def test_threads_may_run_over_selected_pages() -> None:
    wrapper = wl.PageSelectionWrapper(
        kv_format=wl.Paged(4), num_q_heads=HEADS, head_dim=DIM, dtype="float32", device="cpu"
    )
    selection = torch.stack([torch.randperm(12)[:9] for _ in range(HEADS)]).int()[None]
    wrapper.plan([0, 3], [0, 9], selection, [2])
    q, cache = torch.randn(3, HEADS, DIM), torch.randn(12, 2, 4, HEADS, DIM)
    expected = wrapper.run(q, cache), wrapper.run(2 * q, cache)

    def work(at: int) -> None:
        for _ in range(50):
            assert torch.equal(wrapper.run((1 + at) * q, cache), expected[at])

    hammer(lambda: work(0), lambda: work(1))
    held = wrapper._state.guard
    assert held.try_enter(False)
    try:
        with pytest.raises(InUse, match="PageSelectionWrapper is in use"):
            wrapper.select(selection.clone())
    finally:
        held.leave()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_waits_for_no_thread_that_it_lacks() -> None:
    wrapper = planned()
    q, k, v = tensors(1)
    expected = wrapper.run(q, (k, v))
    with held_up(wrapper):
        child = os.fork()
        if child == 0:  # no assertion may leave this block
            try:
                with pytest.raises(NotPlanned):  # what the other thread did may be half done
                    wrapper.run(q, (k, v))
                wrapper.plan([0, ROWS], [0, KEYS])
                same = torch.equal(wrapper.run(q, (k, v)), expected)
                os._exit(0 if same else 2)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(wrapper.run(q, (k, v)), expected)
