"""Prefetching on the GPU: results stay, graphs hold it, and what was asked for is in L2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.codegen.abi import Packer, ParamField, struct_text
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.kinds import KernelSpec, Language
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.source import KernelSource
from warploom.errors import ForbiddenUnderCapture
from warploom.prefetch import beside, beside_pages, prefetch
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.loaded import load
from warploom.runtime.devices.params import Block

pytestmark = pytest.mark.gpu

MB = 10**6
PAGE, PAGES = 16, 2048
SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Chase(KernelSpec):
    """One thread loads a word of each line; an address depends on the word before."""

    kind = "chase"
    own = (
        ParamField("const int*", "from", "zeros"),
        ParamField("int*", "sum", "so that nothing is left out"),
        ParamField("long long", "lines", "of 128 bytes"),
    )

    @property
    def name(self) -> str:
        return "chase"

    @property
    def fields(self) -> tuple[ParamField, ...]:
        return self.own

    @property
    def labels(self) -> Mapping[str, str]:
        return {"kind": self.kind}

    def context(self) -> Mapping[str, Any]:
        return {}

    def launch(self, arch: Arch) -> LaunchShape:
        return LaunchShape(1, 0, 1)

    def render(self, language: Language, plan_structs: str = "") -> KernelSource:
        text = """
%s
extern "C" __global__ void %s(const __grid_constant__ Params p) {
  int sum = 0;
  for (long long i = 0; i < p.lines; ++i) sum += __ldcg(p.from + i * 32 + sum);
  *p.sum = sum;
}
"""
        return KernelSource("chase", text % (struct_text(self.own), self.entry), language)


class Reader:
    """Seconds that a chase through a buffer takes, after L2 was filled with something else."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)
        self._sum = torch.zeros(1, dtype=torch.int32, device=device)
        size_of_other = 4 * cuda_facts(device.index).l2_bytes
        self._other = torch.zeros(size_of_other, dtype=torch.bool, device=device)
        spec, packer = Chase(), Packer(Chase.own)
        self._block = Block(packer, packer.size)
        self._block.set("from", self.buffer.data_ptr())
        self._block.set("sum", self._sum.data_ptr())
        self._block.set("lines", size // 128)
        arch = cuda_facts(device.index).arch
        self._launch = load(spec, spec.render("cuda"), arch, device, 1).bind(self._block)

    def seconds(self, before: Any = None) -> float:
        self._other.logical_not_()
        if before is not None:
            before()
        torch.cuda._sleep(2_000_000)  # a millisecond: what was asked for has come
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._launch(torch.cuda.current_stream().cuda_stream)
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("sms", [1, 8, 40])
def test_what_was_asked_for_is_in_l2(keep: bool, sms: int, cuda: Any) -> None:
    """A load from L2 takes less than half as long as one from memory."""
    reader = Reader(cuda, 4 * MB // 128 * 128)
    asks = lambda: prefetch(reader.buffer, 4 * MB, sms=sms, keep=keep)  # noqa: E731
    asks()
    cold = median(reader.seconds() for _ in range(5))
    warm = median(reader.seconds(asks) for _ in range(5))
    hot = median(reader.seconds(lambda: reader.buffer.sum()) for _ in range(5))
    assert warm < 0.75 * cold
    assert warm < 1.15 * hot


def test_only_the_budget_is_fetched(cuda: Any) -> None:
    reader = Reader(cuda, 4 * MB // 128 * 128)
    times = []
    for budget in (MB, 2 * MB, 4 * MB):
        asks = lambda budget=budget: prefetch(reader.buffer, budget)  # noqa: E731
        asks()
        times.append(median(reader.seconds(asks) for _ in range(5)))
    assert times[0] > times[1] > times[2]


def test_a_graph_holds_it_and_results_stay(cuda: Any) -> None:
    weights = [torch.randn(2048, 2048, device=cuda, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(4, 2048, device=cuda, dtype=torch.bfloat16)

    def model(fetches: bool) -> torch.Tensor:
        y = x
        for i, weight in enumerate(weights):
            if fetches:
                with beside(weights[i:], 8 * MB):
                    y = y * 2
            else:
                y = y * 2
            y = y @ weight
        return y

    expected = model(False)
    assert torch.equal(model(True), expected)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        out = model(True)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_new_tensors_are_refused_under_capture(cuda: Any) -> None:
    x, y = torch.zeros(2, 1000, device=cuda)
    prefetch(x, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefetch(x, 1000)
        with pytest.raises(ForbiddenUnderCapture):
            prefetch(y, 1000)
    graph.replay()
    torch.cuda.synchronize()


def batch(lens: list[int], seed: int) -> tuple[Any, ...]:
    pages = [-(-n // PAGE) for n in lens]
    order = np.random.default_rng(seed).permutation(PAGES)[: sum(pages)]
    last = [(n - 1) % PAGE + 1 for n in lens]
    return list(range(len(lens) + 1)), np.cumsum([0, *pages]), order, last


def test_a_captured_prefetch_follows_the_plan(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=8, max_q_rows=8, max_kv_len=4000, max_blocks=PAGES)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), bounds=bounds, cuda_graph=True, device=cuda, **SHAPE
    )
    eager = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(PAGE), device=cuda, **SHAPE)
    cache = torch.randn(PAGES, 2, PAGE, 2, 128, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(8, 8, 128, device=cuda, dtype=torch.bfloat16)
    attention.plan(*batch([700, 30, 2000], 0))

    def step() -> torch.Tensor:
        with beside_pages(attention, cache, 16 * MB):
            doubled = q * 2
        return attention.run(doubled, cache)

    step()
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        out = step()
    for seed, lens in enumerate([[700, 30, 2000], [1], [3999] * 5, [16] * 8]):
        given = batch(lens, seed)
        attention.plan(*given)
        eager.plan(*given)
        graph.replay()
        wanted = eager.run(q[: len(lens)] * 2, cache)
        torch.testing.assert_close(out[: len(lens)], wanted, rtol=2e-2, atol=2e-2)
        assert attention._pages is not None
        read = set(given[2].tolist())
        records = attention._pages.table.read()
        step_bytes = cache.stride(0) * cache.element_size()
        assert set((records["offset"] // step_bytes).tolist()) <= read
