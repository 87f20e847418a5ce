"""`prefetch_pass`: where prefetches go, what of, within which limit; and that results stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import page_tables
from support.prefetching_ranks import check_two_ranks
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import warploom as wl
from warploom.errors import ArgumentError
from warploom.prefetch import Overlap, SafeBudget, prefetch_pass
from warploom.prefetch_errors import BadBudget

WEIGHT = 64 * 64 * 4


def launched(x: Any) -> Any:
    return torch.ops._c10d_functional.all_reduce(x, "sum", "nobody")


def waited(x: Any) -> Any:
    return torch.ops._c10d_functional.wait_tensor(x)


class Chain(nn.Module):
    """Products with collectives between them; one is not behind the first collective."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(5))
        self.table = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Any) -> Any:
        a, b, c, d, e = self.layers
        flying = launched(a(x))
        aside = e(x)
        y = c(b(waited(flying)))
        z = torch.matmul(waited(launched(y)), self.table.t())
        return d(z) + aside


def names(module: GraphModule) -> list[str]:
    """Operators and layers in the order of the graph, prefetches with their tensors."""
    found = []
    for node in module.graph.nodes:
        name = str(node.target).removesuffix(".default")
        if name == "warploom.prefetch":
            found.append("fetch " + " ".join(str(x.target) for x in node.args[1]))
        elif node.op in ("call_function", "call_module"):
            found.append(name.rpartition("functional.")[2] or name)
    return found


def test_between_launch_and_wait_in_the_order_of_use() -> None:
    module = symbolic_trace(Chain())
    found = prefetch_pass(module, 1 << 20)
    assert [one.tensors for one in found] == [
        ("layers.1.weight", "layers.2.weight"),
        ("table", "layers.3.weight"),
    ]
    assert [one.bytes for one in found] == [2 * WEIGHT, 2 * WEIGHT]
    text = names(module)
    first = text.index("fetch layers.1.weight layers.2.weight")
    assert text[first - 1] == "all_reduce" and text.index("wait_tensor") > first
    second = text.index("fetch table layers.3.weight")
    assert text[second - 1] == "all_reduce" and text[second + 1] == "wait_tensor"
    assert "layers.4" in text and not any("layers.4" in x for x in text if x.startswith("fetch"))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (WEIGHT + 200, [(("layers.1.weight", "layers.2.weight"), WEIGHT + 200),
                        (("table", "layers.3.weight"), WEIGHT + 200)]),
        (WEIGHT, [(("layers.1.weight",), WEIGHT), (("table",), WEIGHT)]),
    ],
)  # fmt: skip
def test_the_limit(limit: int, expected: Any) -> None:
    found = prefetch_pass(symbolic_trace(Chain()), limit)
    assert [(one.tensors, one.bytes) for one in found] == expected


@pytest.mark.parametrize("keep", [None, True, False])
def test_marks_are_passed_on(keep: bool | None) -> None:
    module = symbolic_trace(Chain())
    prefetch_pass(module, 1 << 20, keep=keep)
    found = [n for n in module.graph.nodes if str(n.target) == "warploom.prefetch.default"]
    assert [node.args[-1] for node in found] == [keep, keep]


def test_once_and_only_where_there_are_collectives() -> None:
    module = symbolic_trace(Chain())
    prefetch_pass(module, 1 << 20)
    before = names(module)
    assert prefetch_pass(module, 1 << 20) == [] and names(module) == before
    alone = symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert prefetch_pass(alone, 1 << 20) == []


class TwoLaunches(nn.Module):
    """What both collectives are followed by is fetched beside the first, and then in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Any, y: Any) -> Any:
        one, other = launched(x), launched(y)
        return self.first(waited(one)) + self.second(self.first(waited(other)))


def test_what_is_in_flight_counts_and_is_not_fetched_again() -> None:
    found = prefetch_pass(symbolic_trace(TwoLaunches()), WEIGHT + WEIGHT // 2)
    assert [(one.tensors, one.bytes) for one in found] == [
        (("first.weight",), WEIGHT),
        (("second.weight",), WEIGHT // 2),
    ]


class Stacked(nn.Module):
    """Weights of several layers in one tensor, columns of another, and one elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 64, 64))
        self.wide = nn.Parameter(torch.randn(64, 128))
        self.away = nn.Parameter(torch.empty(64, 64, device="meta"))

    def forward(self, x: Any) -> Any:
        y = waited(launched(x))
        z = torch.matmul(y, torch.ops.aten.select.int(self.stack, 0, 1))
        z = torch.matmul(z, torch.ops.aten.slice.Tensor(self.wide, 1, 0, 64))
        return torch.matmul(z, self.away)


def test_views_are_fetched_if_they_are_blocks_on_this_device() -> None:
    module: Any = symbolic_trace(Stacked())
    for node in module.graph.nodes:  # as a compiler would note it
        name = str(node.target)
        if name in ("stack", "wide", "away"):
            node.meta["val"] = getattr(module, name)
        elif "select" in name:
            node.meta["val"] = module.stack[1]
        elif "slice" in name:
            node.meta["val"] = module.wide[:, :64]
        elif "all_reduce" in name:
            node.meta["val"] = torch.empty(1, 64)
    (found,) = prefetch_pass(module, 1 << 20)
    assert found.bytes == WEIGHT and len(found.tensors) == 1
    module.graph.lint()
    (node,) = (n for n in module.graph.nodes if str(n.target) == "warploom.prefetch.default")
    assert [str(n.target) for n in node.args[1]] == ["aten.select.int"]


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("warploom_test", "DEF")
    made.define("all_reduce(Tensor x) -> Tensor")
    made.impl("all_reduce", lambda x: 2 * x, "CompositeExplicitAutograd")
    yield made
    made._destroy()


def test_collectives_of_the_current_stream(library: torch.library.Library) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return self.b(torch.ops.warploom_test.all_reduce(self.a(x)))

    model, x = Model(), torch.randn(3, 64)
    module = symbolic_trace(model)
    prefetch_pass(module, 1 << 20, collectives=["warploom_test::all_reduce"])
    assert names(module) == [
        "a", "fetch b.weight", "warploom_test.all_reduce", "warploom.join_prefetch", "b"
    ]  # fmt: skip
    assert torch.equal(module(x), model(x))


FREE = Overlap(
    bandwidth=2e12, startup=0.0, rate=1e9, kept=1e6, hit_rate=1e15, fixed=0.0, error=0.0,
    own_error=0.0,
)  # fmt: skip
CHOSEN = int(0.9 * 8e9 * 10e-6) // 128 * 128  # most of what 8 CTAs bring in 10 us


@pytest.mark.parametrize(
    ("budget", "limit"),
    [(1 << 16, 1 << 16), (SafeBudget(FREE, 10e-6, sms=(8,)), CHOSEN)],
    ids=["given", "chosen"],
)
def test_runs_have_their_pages_prefetched_with_what_weights_leave(
    budget: int | SafeBudget, limit: int
) -> None:
    attention = wl.AttentionWrapper(
        kv_format=wl.Paged(4), num_q_heads=2, num_kv_heads=2, head_dim=8, dtype="float32",
        device="cpu",
    )  # fmt: skip
    attention.plan([0, 1], [0, 3], [2, 0, 1], [4])
    weight, cache = torch.randn(16, 16), torch.randn(2, 4, 4, 2, 8)
    x = torch.randn(1, 16)

    def model(x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor) -> Any:
        y = torch.ops.warploom_test_pages.all_reduce(x)
        q = (y @ weight).view(1, 2, 8)
        return attention.run(q, (cache[0], cache[1])).flatten(1) @ weight

    graphs, made = [], torch.library.Library("warploom_test_pages", "DEF")
    try:
        made.define("all_reduce(Tensor x) -> Tensor")
        made.impl("all_reduce", lambda x: 2 * x, "CompositeExplicitAutograd")

        def backend(module: GraphModule, _: Any) -> Any:
            from torch._dynamo.backends.common import aot_autograd

            def compiler(inner: GraphModule, _: Any) -> Any:
                names = ["warploom_test_pages::all_reduce"]
                graphs.append((prefetch_pass(inner, budget, collectives=names), inner))
                return inner

            return aot_autograd(fw_compiler=compiler)(module, _)

        with torch.no_grad():
            out = torch.compile(model, backend=backend, fullgraph=True)(x, weight, cache)
        assert torch.equal(out, model(x, weight, cache))
    finally:
        made._destroy()
    ((inserted,), inner) = graphs[0]
    assert len(inserted.pages) == 1 and inserted.bytes == 16 * 16 * 4
    (node,) = (n for n in inner.graph.nodes if "prefetch_pages" in str(n.target))
    assert node.args[4] == limit - 16 * 16 * 4
    (pages,) = page_tables(attention)
    assert pages.bytes == 3 * 2 * 4 * 2 * 8 * 4


def test_bad_arguments() -> None:
    for wrong in (-1, None):
        with pytest.raises(BadBudget, match="SafeBudget"):
            prefetch_pass(Graph(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="vllm::all_reduce"):
        prefetch_pass(Graph(), 1000, collectives=["all_reduce"])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed part")
def test_two_ranks_compute_the_same_with_and_without(tmp_path: Path) -> None:
    """Inductor and AOTAutograd, weights cut by hand and by DTensor, over gloo."""
    check_two_ranks(tmp_path, "cpu")
