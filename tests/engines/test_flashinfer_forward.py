"""`forward` as engines call it: arguments of each layer, and plans in between that lack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.flashinfer_reference import Asked, Batch, assert_close

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines import flashinfer as calls
from warploom.errors import (
    ArgumentError,
    BadLength,
    ForbiddenUnderCapture,
    FrozenByGraph,
    NotPlanned,
    UnequalRequests,
    WrongShape,
)
from warploom.runtime.wrappers.wrapper import AttentionWrapper

flashinfer: Any = calls
WORKSPACE = torch.empty(1, dtype=torch.uint8)
F32 = {"q_data_type": "float32"}
SIZES = (4, 2, 32, 4)  # heads, lanes and page size of `Batch`


def planned(wrapper: Any, batch: Batch, **more: Any) -> None:
    lists = batch.indptr, batch.indices, batch.last_page_len
    wrapper.begin_forward(*lists, *SIZES, **(F32 | more))


def of_graphs() -> Any:
    buffers = {
        "paged_kv_indptr_buffer": torch.empty(3), "paged_kv_indices_buffer": torch.empty(64),
        "paged_kv_last_page_len_buffer": torch.empty(2),
    }  # fmt: skip
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **buffers)


BATCHES = [Batch.of([(1, 9), (1, 5)]), Batch.of([(1, 40), (1, 1)], seed=1)]
LAYERS = [Asked(), Asked(cap=2.0), Asked(window=3)]


def forward(wrapper: Any, batch: Batch, asked: Asked) -> Any:
    shaping = {"logits_soft_cap": asked.cap, "window_left": asked.window}
    return wrapper.forward(batch.q, batch.cache, sm_scale=32**-0.5, return_lse=True, **shaping)


@pytest.mark.parametrize("make", [of_graphs, None], ids=["graph", "eager"])
def test_layers_differ_and_plans_say_nothing_of_them(make: Any) -> None:
    """As SGLang decodes: a plan for a step, and what is of a layer at its `forward`."""
    wrapper = make() if make else flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for batch in (*BATCHES, *BATCHES):
        planned(wrapper, batch)
        for asked in (*LAYERS, *LAYERS):
            assert_close(forward(wrapper, batch, asked), batch.expected(asked))


def test_a_step_is_planned_once_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[object] = []
    plan = AttentionWrapper.plan

    def counted(self: AttentionWrapper, *args: Any, **named: Any) -> None:
        plans.append(self)
        plan(self, *args, **named)

    monkeypatch.setattr(AttentionWrapper, "plan", counted)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for turn, batch in enumerate((*BATCHES, *BATCHES)):
        plans.clear()
        planned(wrapper, batch)
        for asked in (LAYERS[1], LAYERS[2]) * 3:
            forward(wrapper, batch, asked)
        assert len(plans) == len(set(plans)) == (3 if turn == 0 else 2)


def test_replays_read_what_is_planned_without_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured `forward` runs no Python again: its wrapper is planned by the facade's plan."""
    wrapper = of_graphs()
    planned(wrapper, BATCHES[0])
    forward(wrapper, BATCHES[0], LAYERS[1])
    captured = wrapper.wrapper
    monkeypatch.setattr(f"{calls.__name__}.facade.is_capturing", lambda _: True)
    forward(wrapper, BATCHES[0], LAYERS[1])
    with pytest.raises(ForbiddenUnderCapture, match="what no run since the plan was given"):
        forward(wrapper, BATCHES[0], LAYERS[2])
    monkeypatch.undo()
    planned(wrapper, BATCHES[1])
    batch = BATCHES[1]
    replayed = captured.run(batch.q, batch.cache, return_lse=True)
    assert_close(replayed, batch.expected(LAYERS[1]))
    with pytest.raises(FrozenByGraph, match=r"logits_soft_cap is 3\.0, but the first plan"):
        planned(wrapper, BATCHES[0], logits_soft_cap=3.0)


def test_values_that_mean_the_same_are_the_same() -> None:
    wrapper = of_graphs()
    for given in (
        {"logits_soft_cap": 0.0}, {"logits_soft_cap": None}, {"window_left": -2},
        {"sm_scale": 32**-0.5}, {"rope_theta": 1e4, "rope_scale": 1.0}, {"sm_scale": None},
    ):  # fmt: skip
        planned(wrapper, BATCHES[0], **given)
        wrapper.run(BATCHES[0].q, BATCHES[0].cache)


def test_what_forward_is_given_holds_until_the_next_plan() -> None:
    wrapper, batch = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE), BATCHES[0]
    planned(wrapper, batch)
    forward(wrapper, batch, LAYERS[1])
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(LAYERS[1]))
    forward(wrapper, batch, LAYERS[2])
    got = wrapper.run_return_lse(batch.q, batch.cache, window_left=LAYERS[2].window)
    assert_close(got, batch.expected(LAYERS[2]))
    planned(wrapper, batch)
    with pytest.raises(ArgumentError, match="window_left"):
        wrapper.run(batch.q, batch.cache, window_left=LAYERS[2].window)
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(LAYERS[0]))


def test_a_refused_forward_changes_nothing() -> None:
    """Neither runs of the batch, nor later plans."""
    wrapper, batch = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE), BATCHES[0]
    for _ in range(2):
        planned(wrapper, batch)
        with pytest.raises(ArgumentError, match="sm_scale"):
            wrapper.forward(batch.q, batch.cache, sm_scale=float("nan"))
        with pytest.raises(WrongShape):
            wrapper.forward(batch.q[:1], batch.cache, logits_soft_cap=2.0)
        assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(LAYERS[0]))


def test_values_of_forward_that_mean_the_same_are_of_one_plan() -> None:
    wrapper, batch = of_graphs(), BATCHES[0]
    planned(wrapper, batch, logits_soft_cap=2.0)
    seen = set()
    alike = {"window_left": -1}, {"window_left": -2}, {"rope_theta": 1e4}, {"sm_scale": 32**-0.5}
    for given in alike:
        wrapper.forward(batch.q, batch.cache, logits_soft_cap=3.0, **given)
        seen.add(id(wrapper.wrapper))
    assert len(seen) == 1
    wrapper.forward(batch.q, batch.cache, logits_soft_cap=2.0)  # as it is planned
    assert id(wrapper.wrapper) not in seen


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"window_left": 1.5}, ArgumentError),
        ({"pos_encoding_mode": "ROPE"}, ArgumentError),
        ({"kv_data_type": "float16"}, UnsupportedByEngine),
        ({"seq_lens": torch.tensor([9, 6])}, BadLength),
    ],
)
def test_a_refused_plan_leaves_none(wrong: dict[str, Any], error: type[Exception]) -> None:
    wrapper, batch = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE), BATCHES[0]
    with pytest.raises(NotPlanned, match="there is no plan yet"):
        wrapper.run(batch.q, batch.cache)
    planned(wrapper, batch)
    with pytest.raises(error):
        planned(wrapper, batch, **wrong)
    with pytest.raises(NotPlanned, match=r"the last plan\(\) was refused, or interrupted"):
        wrapper.run(batch.q, batch.cache)
    planned(wrapper, batch)
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(Asked()))


def test_swapped_tables_of_an_append_are_refused() -> None:
    k, v = torch.randn(2, 1, 2, 32)
    cache = torch.zeros(8, 2, 4, 2, 32)
    request, position, last = (torch.tensor(x).int() for x in ([0], [3], [4, 4]))
    indices, indptr = torch.tensor([5, 6, 7]).int(), torch.tensor([0, 1, 3, 4]).int()
    with pytest.raises(UnequalRequests, match="kv_indices comes before kv_indptr"):
        flashinfer.append_paged_kv_cache(k, v, request, position, cache, indices, indptr, last)
