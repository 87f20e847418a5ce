"""The loop of `examples/generate.py`: one graph holds the whole step, and nothing waits for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.gpu


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import generate  # pyright: ignore[reportMissingImports]

    return generate


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever in torch waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is said to be a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def suffixes_of(lens: list[int], cuda: Any) -> list[torch.Tensor]:
    return list(torch.randint(0, 97, (sum(lens),), device=cuda).split(lens))


@torch.no_grad()
def test_replays_of_one_graph_generate_what_sdpa_does(cuda: Any, generate: ModuleType) -> None:
    model = generate.small_llama(layers=2)
    prefix = torch.randint(0, 97, (generate.PREFIX,), device=cuda)
    suffixes = suffixes_of([3, 17, 1, 30, 8, 12, 16], cuda)
    generation = generate.Generation(model, prefix, suffixes)
    generation.step()
    graph = generation.captured()
    before = generation.lens.clone()
    with no_synchronisation():
        for _ in range(generate.NEW - 2):
            graph.replay()
    assert torch.equal(generation.lens, before + generate.NEW - 2)
    attention = generation.llama.attention
    attention.check_plan()
    assert type(attention.planned.batch).__name__ == "OnDevice"
    assert torch.equal(generation.new[:, -1], generation.tokens)
    for new, suffix in zip(generation.new, suffixes, strict=True):
        assert generate.is_greedy(model, torch.cat((prefix, suffix)), new), new


@torch.no_grad()
def test_replays_generate_what_single_steps_do(
    cuda: Any, generate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps outside of a graph wait for nothing either."""
    monkeypatch.delenv("WARPLOOM_VERIFY_PLANS", raising=False)  # checks of plans do wait
    model = generate.small_llama(layers=2)
    prefix = torch.randint(0, 97, (generate.PREFIX,), device=cuda)
    suffixes = suffixes_of([5, 15, 16, 2], cuda)
    eager, replayed = (generate.Generation(model, prefix, suffixes) for _ in range(2))
    eager.step()
    replayed.step()
    graph = replayed.captured()
    prefixes = [cache[:, : generate.SHARED].clone() for cache in replayed.llama.caches]
    with no_synchronisation():
        for _ in range(generate.NEW - 2):
            eager.step()
            graph.replay()
    for one in (eager, replayed):
        one.llama.attention.check_plan()
        for new, suffix in zip(one.new, suffixes, strict=True):
            assert generate.is_greedy(model, torch.cat((prefix, suffix)), new), new
    assert torch.equal(eager.lens, replayed.lens)
    for cache, before in zip(replayed.llama.caches, prefixes, strict=True):
        assert torch.equal(cache[:, : generate.SHARED], before)  # steps write behind the prefix
    same = (eager.new == replayed.new).float().mean()
    assert same > 0.5  # not all: in half precision two tokens may tie
