"""The benchmark of virtual caches measures what it says, where it is small."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

import warploom as wl

CPU = torch.device("cpu")


def test_growth_and_handover_have_all_their_ways(harness: ModuleType, tmp_path: Path) -> None:
    benchmark = __import__("virtual_cache")
    tables = ["--tables", "growth", "handover"]
    benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path), *tables])
    _, rows = harness.load_rows(tmp_path / "virtual_growth_cpu.jsonl")
    us = {row.impl: row.value for row in rows if row.case == "a token, mean"}
    assert us["virtual, taken over"] < us["virtual, mapped by grow"] / 10
    _, rows = harness.load_rows(tmp_path / "virtual_handover_cpu.jsonl")
    for pages in (1, 16):
        us = {row.impl: row.value for row in rows if row.params["pages"] == pages}
        assert len(us) == 4 and us["own next request"] < us["another model's request"]


def test_the_paged_allocator_beside_it_is_one(harness: ModuleType) -> None:
    paged = __import__("virtual_cache").PagedAllocator(8)
    paged.grow(0, 16)
    paged.grow(1, 33)
    paged.grow(1, 40)
    assert sorted([*paged.free, *paged.tables[0], *paged.tables[1]]) == list(range(8))
    given = paged.plan_arguments({1: 40, 0: 16})
    assert given["kv_indptr"].tolist() == [0, 3, 4] and given["last_page_len"].tolist() == [8, 16]
    attention = wl.AttentionWrapper(
        kv_format=wl.Paged(16), num_q_heads=1, head_dim=64, dtype="float32", device="cpu"
    )
    attention.plan([0, 1, 2], **given)
