"""Appending on the GPU writes what the CPU back end writes, in captured graphs too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl

pytestmark = pytest.mark.gpu

HEADS, PAGES, ROWS = 4, 600, 300


class Normalised(wl.Rope):
    """A reduction over lanes, and RoPE."""

    def value_transform(self, v: Any, at: Any) -> Any:
        return v * wl.rsqrt(wl.mean(v * v) + 1e-5) + wl.to_float(at.kv_pos + at.batch)


def batch(old: Any, new: Any, page_size: int, seed: int) -> list[torch.Tensor]:
    """indptr, kv_indptr, kv_indices, last_page_len; the list of pages is always as long."""
    lens = np.add(old, new)
    pages = -(-lens // page_size)
    order = np.random.default_rng(seed).permutation(PAGES)
    tables = (np.cumsum([0, *new]), np.cumsum([0, *pages]), order, (lens - 1) % page_size + 1)
    return [torch.tensor(np.asarray(table), dtype=torch.int32) for table in tables]


BATCHES = [
    ((0, 3, 17, 40), (9, 1, 0, 30)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((100, 1, 2, 3), (1, 1, 1, 1)),
    ((0, 0, 1, 200), (150, 100, 20, 30)),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "dims"), [("bfloat16", (128, 128)), ("float16", (192, 72))])
def test_the_gpu_writes_what_the_cpu_writes(
    cuda: Any, page_size: int, layout: Any, dtype: str, dims: tuple[int, int]
) -> None:
    element = getattr(torch, dtype)
    k, v = (torch.randn(ROWS, HEADS, dim, dtype=element) for dim in dims)
    order = (page_size, HEADS) if layout == "NHD" else (HEADS, page_size)
    declared: dict[str, Any] = {
        "kv_format": wl.Paged(page_size, layout=layout), "num_kv_heads": HEADS,
        "head_dim": dims[0], "head_dim_v": dims[1], "dtype": dtype,
    }  # fmt: skip
    device_tables = [x.to(cuda) for x in batch(*BATCHES[0], page_size, 0)]
    for variant in (None, Normalised(100.0)):
        appender = wl.Appender(variant, **declared, device=cuda)
        on_cpu = wl.Appender(variant, **declared, device="cpu")
        caches = [torch.zeros(PAGES, *order, dim, dtype=element, device=cuda) for dim in dims]
        new = k.to(cuda), v.to(cuda)
        appender(*new, tuple(caches), *device_tables)  # what is compiled is compiled here
        graph = torch.cuda.CUDAGraph()
        with wl.forbid_compilation(), torch.cuda.graph(graph):
            appender(*new, tuple(caches), *device_tables)
        for seed, (old, added) in enumerate(BATCHES):
            tables = batch(old, added, page_size, seed)
            for captured, table in zip(device_tables, tables, strict=True):
                captured.copy_(table)
            expected = [torch.full(x.shape, 7.0, dtype=element) for x in caches]
            for cache in caches:
                cache.fill_(7.0)
            graph.replay()
            on_cpu(k, v, tuple(expected), *tables)
            for got, wanted in zip(caches, expected, strict=True):
                if variant is None:
                    assert torch.equal(got.cpu(), wanted)
                else:
                    torch.testing.assert_close(got.cpu(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("begin", [-1, -5, -(2**31)])
def test_tables_that_begin_before_the_list_write_nothing(begin: int, cuda: Any) -> None:
    k = torch.randn(2, HEADS, 64, dtype=torch.float16, device=cuda)
    cache = torch.zeros(2, 8, 4, HEADS, 64, dtype=torch.float16, device=cuda)
    tables = [0, 2], [begin, begin + 1], [3], [4]
    given = [torch.tensor(table, dtype=torch.int32, device=cuda) for table in tables]
    wl.append(k, k, tuple(cache), *given)
    assert not cache.any()


def test_rows_before_the_first_request_write_nothing(cuda: Any) -> None:
    k = torch.randn(5, HEADS, 64, dtype=torch.float16, device=cuda)
    cache = torch.zeros(2, 8, 4, HEADS, 64, dtype=torch.float16, device=cuda)
    tables = [2, 4, 5], [0, 2, 3], [0, 1, 2], [4, 4]
    given = [torch.tensor(table, dtype=torch.int32, device=cuda) for table in tables]
    wl.append(k, k, tuple(cache), *given)
    assert cache[0, 1, 2:].equal(k[2:4])
    assert cache[0, 2, 3].equal(k[4])
    cache[:, 1, 2:] = cache[:, 2, 3] = 0
    assert not cache.any()


def test_tables_that_point_outside_write_nothing(cuda: Any) -> None:
    k = torch.randn(4, HEADS, 64, dtype=torch.float16, device=cuda)
    cache = torch.zeros(2, 8, 4, HEADS, 64, dtype=torch.float16, device=cuda)
    tables = [[0, 4], [0, 1], [99], [4]], [[0, 4], [0, 1], [-3], [4]], [[0, 4], [0, 1], [2], [2]]
    for wrong in tables:
        given = [torch.tensor(table, dtype=torch.int32, device=cuda) for table in wrong]
        cache.zero_()
        wl.append(k, k, tuple(cache), *given)
        written = int((cache[0, 2] != 0).any(-1).any(-1).sum())
        assert written == (2 if wrong[2] == [2] else 0)
        assert int((cache != 0).any(-1).any(-1).sum()) == 2 * written
