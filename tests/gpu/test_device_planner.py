"""The planner kernel writes the plans of the host, bit for bit, and a CUDA graph can hold it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import BatchRefused, BoundsExceeded
from warploom.scheduler.plans.verify import verify

pytestmark = pytest.mark.gpu

LONGEST, REQUESTS, PAGES, PAGE = 20_000, 300, 40_000, 16


def lengths(rng: Any, rows: int) -> tuple[Any, Any]:
    size = int(rng.choice([0, 1, 2, 17, 128, REQUESTS]))
    kv_lens = {
        "equal": np.full(size, rng.integers(0, LONGEST // 20)),
        "even": rng.integers(0, LONGEST // 20, size),
        "zipf": np.minimum(rng.zipf(1.5, size) * 16, LONGEST // 4),
        "giants": np.where(rng.random(size) < 0.05, LONGEST, rng.integers(0, 70, size)),
    }[str(rng.choice(["equal", "even", "zipf", "giants"]))]
    q_lens = rng.integers(0, rows + 1, size) if rows > 1 else np.ones(size, int)
    return q_lens, kv_lens


def arguments(q_lens: Any, kv_lens: Any, rng: Any, page: int) -> list[torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len on the host."""
    pages = -(-kv_lens // page)
    parts = [
        np.append(0, np.cumsum(q_lens)),
        np.append(0, np.cumsum(pages)),
        np.resize(rng.permutation(4096), int(pages.sum())),
        np.where(kv_lens > 0, (kv_lens - 1) % page + 1, 0),
    ]
    return [torch.from_numpy(part.astype(np.int32)) for part in parts]


def make(variant: Any, heads: tuple[int, int], rows: int, page: int, **options: Any) -> Any:
    bounds = wl.Bounds(REQUESTS, REQUESTS * rows, LONGEST, PAGES * PAGE // page)
    return wl.AttentionWrapper(
        variant, kv_format=wl.Paged(page), num_q_heads=heads[0], num_kv_heads=heads[1],
        head_dim=64, dtype="bfloat16", bounds=bounds, cuda_graph=True, **options,
    )  # fmt: skip


def assert_same_plan(found: Any, expected: Any) -> None:
    for name, content in expected.plan.sections().items():
        assert np.array_equal(found.plan.sections()[name], content), name


@pytest.mark.parametrize(
    ("variant", "heads", "rows", "page", "limit"),
    [
        (None, (32, 8), 1, 16, None),
        (wl.Causal(), (8, 2), 5, 16, 100),
        (wl.Causal() & wl.SlidingWindow(500), (5, 5), 12, 16, None),
        (wl.Causal(), (4, 1), 1, 1, None),
        (wl.PrefixLM(), (32, 32), 3, 16, 7),
    ],
)
def test_device_plans_equal_host_plans(
    cuda: Any, variant: Any, heads: tuple[int, int], rows: int, page: int, limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # With one tile: a device deals no prefills of two roles (decision 0062).
    monkeypatch.setenv("WARPLOOM_MIXED_ROLES", "0")
    device = make(variant, heads, rows, page, sm_limit=limit)
    host = make(variant, heads, rows, page, sm_limit=limit)
    rng = np.random.default_rng(rows)
    prefix = torch.zeros(REQUESTS, dtype=torch.int32)
    on_device = prefix.to(cuda)
    for _ in range(25):
        q_lens, kv_lens = lengths(rng, rows)
        lists = arguments(q_lens, kv_lens, rng, page)
        inputs: tuple[Any, Any] = ({}, {})
        if isinstance(variant, wl.PrefixLM):
            prefix[: len(kv_lens)] = torch.from_numpy(kv_lens // 3)
            on_device.copy_(prefix)
            inputs = {"prefix_len": on_device}, {"prefix_len": prefix}
        host.plan(*lists, **inputs[1])
        device.plan(*(part.to(cuda) for part in lists), **inputs[0])
        device.check_plan()
        assert type(device.planned.batch).__name__ == "OnDevice"
        assert_same_plan(device.planned, host.planned)
        if not isinstance(variant, wl.PrefixLM):  # NumPy does not know values on the device
            verify(device.planned.plan, device.planned.visibility)


def test_one_graph_holds_plan_and_run(cuda: Any) -> None:
    """Lengths change in device memory between replays; nothing else does."""
    rows, requests = 64, 64
    bounds = wl.Bounds(requests, rows, 5000, 4096)
    shape: dict[str, Any] = {
        "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16",
    }  # fmt: skip
    variant, kv_format = wl.Causal() & wl.SlidingWindow(3000), wl.Paged(PAGE)
    attention = wl.AttentionWrapper(
        variant, kv_format=kv_format, bounds=bounds, cuda_graph=True, **shape
    )
    eager = wl.AttentionWrapper(variant, kv_format=kv_format, **shape)
    q = torch.randn(rows, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(4096, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    sizes = requests + 1, requests + 1, 4096, requests
    lists = [torch.zeros(size, dtype=torch.int32, device=cuda) for size in sizes]
    attention.plan(*lists)
    attention.run(q, cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        attention.plan(*lists)
        attention.run(q, cache, out=out)
    rng = np.random.default_rng(0)
    for step in range(40):
        size = int(rng.integers(0, requests + 1))
        kv_lens = np.minimum(
            rng.integers(0, 5000 if step % 4 else 40, size), 60_000 // max(1, size)
        )
        q_lens = np.ones(size, int)
        given = arguments(q_lens, kv_lens, rng, PAGE)
        for target, part, pad in zip(lists, given, (size, None, 0, 0), strict=True):
            last = int(part[-1]) if target is lists[1] and len(part) else pad
            target.copy_(torch.nn.functional.pad(part, (0, len(target) - len(part)), value=last))
        out.fill_(7.0)
        graph.replay()
        attention.check_plan()
        eager.plan(*given)
        expected = eager.run(q[:size], cache)
        torch.testing.assert_close(out[:size], expected, atol=2e-2, rtol=2e-2)
        assert (out[size:] == 7.0).all()


def test_refused_batches_compute_nothing(cuda: Any) -> None:
    attention = make(wl.Causal(), (8, 2), 1, PAGE)
    q = torch.randn(REQUESTS, 8, 64, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(64, 2, PAGE, 2, 64, device=cuda, dtype=torch.bfloat16)

    def plan(qo: Any, kv: Any, last: Any, page: int = 0) -> None:
        pages = torch.full((4096,), page, dtype=torch.int32, device=cuda)
        lists = [torch.tensor(x, dtype=torch.int32, device=cuda) for x in (qo, kv, last)]
        attention.plan(lists[0], lists[1], pages, lists[2])

    for qo, kv, last, reason in (
        ([1, 2], [0, 1], [3], "begin at 0"),
        ([0], [2], [], "kv_indptr does not begin at 0"),
        ([0, 2, 1], [0, 1, 2], [3, 3], "qo_indptr decreases"),
        ([0, 1, 2], [0, 2, 1], [3, 3], "kv_indptr decreases"),
        ([0, 1], [0, 1], [17], "page_size"),
        ([0, 1], [0, 1], [0], "page_size"),
        ([0, 301], [0, 1], [3], "query rows"),
        ([0, 1], [0, 1251], [1], "max_kv_len"),
        ([0, 1, 2, 3, 4], [0, 1100, 2200, 3300, 4400], [1] * 4, "pages"),
    ):
        plan(qo, kv, last)
        out = torch.full_like(q, 7.0)
        attention.run(q, cache, out=out)
        with pytest.raises(BatchRefused, match=reason):
            attention.check_plan()
        assert (out == 7.0).all()
    plan([0, 1], [0, 1], [3], page=-1)
    with pytest.raises(BatchRefused, match="page number is negative"):
        attention.check_plan()
    plan([0, 1], [0, 1], [3])
    attention.check_plan()
    with pytest.raises(BoundsExceeded):
        plan(list(range(REQUESTS + 2)), [0] * (REQUESTS + 2), [0] * (REQUESTS + 1))


def test_one_negative_page_refuses_a_batch_of_many_teams(cuda: Any) -> None:
    attention = make(wl.Causal(), (8, 2), 1, PAGE)
    pages = torch.arange(30_000, dtype=torch.int32, device=cuda) % 4096
    rest = [torch.arange(REQUESTS + 1, dtype=torch.int32, device=cuda) * n for n in (1, 100)]
    last = torch.full((REQUESTS,), PAGE, dtype=torch.int32, device=cuda)
    for at in (0, 12_345, 29_999):
        good = int(pages[at])
        pages[at] = -1
        attention.plan(*rest, pages, last)
        with pytest.raises(BatchRefused, match="page number is negative"):
            attention.check_plan()
        pages[at] = good
        attention.plan(*rest, pages, last)
        attention.check_plan()
