"""Steps of an engine become plans: page lists, and wrappers that share the work. No engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import warploom as wl
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.vllm import kinds
from warploom.engines.vllm.kinds import Kind, kinds_of
from warploom.engines.vllm.layers import Layer
from warploom.engines.vllm.steps import Step

PAGE = 4


def step(q_lens: list[int], kv_lens: list[int], pages: torch.Tensor, longest: int = 0) -> Step:
    qo = np.cumsum([0, *q_lens], dtype=np.int32)
    lens = np.array(kv_lens, np.int32)
    return Step(
        page_size=PAGE, rows=int(qo[-1]), longest_q=max(q_lens),
        longest_kv=max(longest, int(lens.max())), qo_indptr=torch.from_numpy(qo),
        kv_lens=torch.from_numpy(lens), pages=pages, host_qo=qo, host_kv=lens,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=6), st.integers(0, 9), st.data())
def test_lists_hold_the_pages_in_use(lens: list[int], extra: int, data: st.DataObject) -> None:
    """Those of a device, which knows no length on the host, and those of a host."""
    width = max(1, -(-max(lens) // PAGE)) + extra
    seed = data.draw(st.integers(0, 99))
    pages = torch.from_numpy(
        np.random.default_rng(seed).permutation(len(lens) * width).astype(np.int32)
    ).view(len(lens), width)
    made = step([1] * len(lens), lens, pages, longest=max(lens) + 2 * extra)
    expected = [list(row[: -(-n // PAGE)]) for row, n in zip(pages.tolist(), lens, strict=True)]
    for lists in (made.on_device, made.on_host):
        indptr = np.asarray(lists.kv_indptr)
        listed = np.asarray(lists.kv_indices)
        found = [list(listed[a:b]) for a, b in pairwise(indptr)]
        assert found == expected
        last = np.asarray(lists.last_page_len)[np.array(lens) > 0]
        assert last.tolist() == [(n - 1) % PAGE + 1 for n in lens if n]


class Scattered(TorchDispatchMode):
    """Notes where entries are written, those in use and the rest."""

    places = torch.empty(0, dtype=torch.int64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.scatter_.src:
            self.places = args[2]
        return func(*args, **(kwargs or {}))


def test_no_two_pages_in_use_are_written_to_one_place() -> None:
    """A GPU writes them in any order."""
    lens, width = [0, 4, 5, 12, 1], 4
    made = step([1] * 5, lens, torch.arange(5 * width).int().view(5, width), longest=width * PAGE)
    with Scattered() as seen:
        lists = made.on_device
    inside = seen.places[seen.places < 5 * width]
    assert sorted(inside.tolist()) == list(range(int(lists.kv_indptr[-1])))


def layer(name: str = "model.layers.0.self_attn.attn", **changes: Any) -> Layer:
    return Layer(name, **{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sm_scale": 0.3,
                          **changes})  # fmt: skip


def attended(kind: Kind, made: Step, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(q)
    kind.run(made, q, (cache[..., :16], cache[..., 16:]), out, {})
    return out


def oracle(found: Layer, made: Step, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The oracle's output."""
    reference = wl.AttentionWrapper(
        found.variant, kv_format=wl.Paged(PAGE, layout="HND"), num_q_heads=4, num_kv_heads=2,
        head_dim=16, sm_scale=0.3, dtype="float32", device="cpu", backend="reference",
    )  # fmt: skip
    reference.plan(*made.on_host)
    return reference.run(q, (cache[..., :16], cache[..., 16:]))


@pytest.mark.parametrize("window", [None, 9])
def test_requests_that_share_pages_get_the_same(window: int | None) -> None:
    """Against the oracle, from a cache as vLLM keeps it: keys and values side by side."""
    found = layer(window=window, soft_cap=3.0)
    kind = Kind(found, found.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"))  # fmt: skip
    cache = torch.randn(40, 2, PAGE, 32, generator=torch.Generator().manual_seed(0))
    shared, own = torch.arange(20), torch.arange(20, 38).view(3, 6)
    apart = torch.arange(39)[torch.randperm(39)][:36].view(3, 12).int()
    together = torch.cat((shared.expand(3, -1), own), 1).int()
    for pages, lens in ((together, [97, 84, 101]), (apart, [41, 3, 47])):
        made = step([1, 3, 2], lens, pages)
        assert made.shares_pages == (pages is together)
        q = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(attended(kind, made, q, cache), oracle(found, made, q, cache))


@pytest.mark.parametrize(("q_lens", "bounded"), [([3, 1, 2], True), ([3, 4, 1], False)])
def test_drafts_within_the_bounds_are_planned_as_a_graph_holds_them(
    q_lens: list[int], bounded: bool
) -> None:
    """Four requests of three rows at most: a decode and two guesses. Against the oracle."""
    found = layer(soft_cap=3.0)
    kind = Kind(found, found.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"), decode=wl.Bounds(4, 12, 64, 64))  # fmt: skip
    cache = torch.randn(40, 2, PAGE, 32, generator=torch.Generator().manual_seed(0))
    made = step(q_lens, [41, 4, 47], torch.randperm(36).view(3, 12).int())
    q = torch.randn(sum(q_lens), 4, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attended(kind, made, q, cache), oracle(found, made, q, cache))
    assert (kind._wrapper(made) is kind._decode) == bounded


def test_a_graph_holds_no_plan_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would read a plan of the step that was captured."""
    found = layer()
    kind = Kind(found, found.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"), decode=wl.Bounds(4, 12, 64, 64))  # fmt: skip
    made = step([3, 4, 1], [41, 4, 47], torch.randperm(36).view(3, 12).int())
    cache = torch.zeros(40, 2, PAGE, 32)
    attended(kind, made, torch.zeros(8, 4, 16), cache)
    monkeypatch.setattr(kinds, "is_capturing", lambda device: True)
    with pytest.raises(UnsupportedByEngine, match="full CUDA graph"):
        attended(kind, made, torch.zeros(8, 4, 16), cache)


def test_a_step_that_another_one_followed_is_planned_again() -> None:
    found = layer()
    kind = Kind(found, found.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"))  # fmt: skip
    cache = torch.randn(8, 2, PAGE, 32)
    first, second = (step([1], [n], torch.arange(8).view(1, 8).int()) for n in (5, 30))
    q = torch.randn(1, 4, 16)
    kind.plan(first)
    expected = attended(kind, first, q, cache)
    kind.plan(second)
    assert not torch.equal(attended(kind, second, q, cache), expected)
    assert torch.equal(attended(kind, first, q, cache), expected)


def test_layers_that_are_alike_share_a_plan() -> None:
    layers = [
        layer("model.layers.0.attn", window=9),
        layer("model.layers.1.attn"),
        layer("model.layers.2.attn", window=9),
        layer("model.layers.3.attn", window=7),
        layer("model.layers.4.attn", window=9, soft_cap=2.0),
    ]
    kinds = kinds_of(layers, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"))
    assert kinds[layers[0].name] is kinds[layers[2].name]
    assert len(set(map(id, kinds.values()))) == 4
    assert [one.index for one in layers] == [0, 1, 2, 3, 4]
