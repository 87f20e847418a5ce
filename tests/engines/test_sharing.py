"""Which steps read shared prefixes once, by what that saves and costs. No engine, no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.engines.vllm import sharing
from warploom.engines.vllm.kinds import Kind
from warploom.engines.vllm.layers import Layer
from warploom.engines.vllm.sharing import BOUND_BY_PRODUCTS, HOST_SECONDS, Sharing, bandwidth
from warploom.engines.vllm.steps import Step

PAGE, GROUP = 4, 2
LAYER = Layer("model.layers.0.self_attn.attn", 4, 2, 16, 0.3)


def step(q_lens: list[int], kv_lens: list[int], pages: list[list[int]]) -> Step:
    qo = np.cumsum([0, *q_lens], dtype=np.int32)
    lens = np.array(kv_lens, np.int32)
    return Step(
        page_size=PAGE, rows=int(qo[-1]), longest_q=max(q_lens), longest_kv=int(lens.max()),
        qo_indptr=torch.from_numpy(qo), kv_lens=torch.from_numpy(lens),
        pages=torch.tensor(pages, dtype=torch.int32), host_qo=qo, host_kv=lens,
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_saved_keys_are_those_of_pages_that_others_list(data: st.DataObject) -> None:
    """A page is read once for each distinct way to it from the first page on."""
    width = 6
    # few numbers, so that tables often begin alike
    row = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    pages = data.draw(st.lists(row, min_size=2, max_size=7))
    kv = [data.draw(st.integers(1, PAGE * width)) for _ in pages]
    q = [data.draw(st.sampled_from([0, 1, 3, BOUND_BY_PRODUCTS // GROUP])) for _ in pages]
    ways = [
        tuple(table[: n + 1])
        for table, length, rows in zip(pages, kv, q, strict=True)
        if 0 < rows < BOUND_BY_PRODUCTS // GROUP
        for n in range(length // PAGE)
    ]
    expected = PAGE * (len(ways) - len(set(ways)))
    assert Sharing(GROUP, 1.0).saved_keys(step(q, kv, pages)) == expected


def test_the_table_is_read_only_where_lengths_allow_it() -> None:
    """32 keys of three requests are saved twice, so 64 reads; lengths allow 71."""
    pages = [[*range(1, 9), 20 + i] for i in range(3)]
    for seconds, reads, pays in (
        (HOST_SECONDS / 72, False, False),  # not even if all were shared
        (HOST_SECONDS / 65, True, False),
        (HOST_SECONDS / 63, True, True),
    ):
        made = step([1, 1, 1], [35, 36, 36], pages)
        assert Sharing(GROUP, seconds).pays(made) == pays
        assert ("host_pages" in vars(made)) == reads


def test_prompts_save_nothing() -> None:
    """Nor does a request alone, nor one whose length only the device knows."""
    pages = [[*range(1, 9), 20 + i] for i in range(3)]
    rows = BOUND_BY_PRODUCTS // GROUP
    assert not Sharing(GROUP, 1.0).pays(step([1, rows, rows], [36, 36, 36], pages))
    assert Sharing(GROUP, 1.0).pays(step([1, 1, rows], [36, 36, 36], pages))
    assert not Sharing(GROUP, 1.0).pays(step([1], [36], pages[:1]))
    unknown = step([1, 1, 1], [36, 36, 36], pages)
    unknown.host_kv = None
    assert not Sharing(GROUP, 1.0).pays(unknown)


def test_prices_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's numbers of an H100 SXM give what its data sheet says."""
    found = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device = torch.device("cuda", 0)
    assert bandwidth(device) == pytest.approx(3.35e12, rel=0.01)
    layer = Layer("model.layers.0.attn", 32, 8, 128, 0.1)
    made = Sharing.of(layer, layers=32, item_bytes=2, device=device)
    assert made.group_size == 4
    assert made.seconds_of_key == pytest.approx(131_072 / 3.35e12, rel=0.01)
    assert Sharing.of(layer, 32, 2, torch.device("cpu")).seconds_of_key == 0


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_kind_shares_where_it_pays(in_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the oracle; decodes that a full graph may hold are `decode`'s, shared or not."""
    monkeypatch.setattr(sharing.Sharing, "of", lambda *_, **__: Sharing(GROUP, 1e-4))
    bounds = wl.Bounds(4, 4, 64, 64) if in_graph else None
    kind = Kind(LAYER, LAYER.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"), decode=bounds)  # fmt: skip
    cache = torch.randn(40, 2, PAGE, 32, generator=torch.Generator().manual_seed(0))
    kv = cache[..., :16], cache[..., 16:]
    together = [[*range(1, 13), 20 + i] for i in range(4)]
    apart = [list(range(i, i + 13)) for i in range(4)]
    for q_lens, pages, expected in (
        ([1, 1, 1, 1], together, "_decode" if in_graph else "_shared"),
        ([1, 1, 1, 6], together, "_shared"),
        ([1, 1, 1, 6], apart, "_mixed"),
    ):
        made = step(q_lens, [52, 50, 49, 51], pages)
        assert kind._wrapper(made) is getattr(kind, expected)
        q = torch.randn(sum(q_lens), 4, 16, generator=torch.Generator().manual_seed(1))
        out = torch.zeros_like(q)
        kind.run(made, q, kv, out, {})
        torch.testing.assert_close(out, reference(made, q, kv))


def test_without_a_prefix_cache_nothing_is_built_for_prefixes() -> None:
    kind = Kind(LAYER, LAYER.variant, page_size=PAGE, dtype=torch.float32,
                device=torch.device("cpu"), prefixes=False)  # fmt: skip
    made = step([1, 1], [8, 8], [[1, 2], [1, 2]])
    assert kind._wrapper(made) is kind._mixed
    assert not hasattr(kind, "_shared")


def reference(made: Step, q: torch.Tensor, kv: Any) -> torch.Tensor:
    wrapper = wl.AttentionWrapper(
        LAYER.variant, kv_format=wl.Paged(PAGE, layout="HND"), num_q_heads=4, num_kv_heads=2,
        head_dim=16, sm_scale=0.3, dtype="float32", device="cpu", backend="reference",
    )  # fmt: skip
    wrapper.plan(*made.with_host_pages)
    return wrapper.run(q, kv)
