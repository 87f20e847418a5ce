"""The benchmark of virtual caches measures what it says, where it is small."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

import warploom as wl

CPU = torch.device("cpu")


def test_growth_and_handover_have_all_their_ways(harness: ModuleType, tmp_path: Path) -> None:
    """Each way has the pages mapped that it is named after: times of a busy host tell nothing."""
    benchmark = __import__("virtual_cache")
    tables = ["--tables", "growth", "handover"]
    benchmark.main(["--device", "cpu", "--quick", "--out", str(tmp_path), *tables])
    _, rows = harness.load_rows(tmp_path / "virtual_growth_cpu.jsonl")
    assert all(row.value > 0 for row in rows)
    growth = {row.impl: row.params["maps"] for row in rows if row.case == "a token, mean"}
    tokens = __import__("virtual_model").TOKENS_OF_A_PAGE
    whole = 4 * (64 // tokens - 1)  # 4 requests; their first pages are there
    assert whole <= growth.pop("virtual, mapped ahead") <= whole + 4  # of each the next page, too
    assert growth == {"paged": 0, "virtual, mapped by grow": whole, "virtual, taken over": 0}
    for way in {row.impl for row in rows}:
        of_steps = {row.case: row for row in rows if row.impl == way and "step" in row.case}
        # 3 steps of each generation cross into a page; ahead, 4 others take pages for those to come
        kinds = {"needs pages": 6}
        if way == "virtual, mapped ahead":
            kinds["takes pages ahead"] = 8
        parts = ("p50", "p99", "longest")
        assert list(of_steps) == [f"a step that {kind}, {part}" for kind in kinds for part in parts]
        for kind, steps in kinds.items():
            own = [of_steps[f"a step that {kind}, {part}"] for part in parts]
            assert [row.value for row in own] == sorted(row.value for row in own)
            assert {row.samples for row in own} == {steps}
    _, rows = harness.load_rows(tmp_path / "virtual_handover_cpu.jsonl")
    for pages in (1, 16):
        of_pages = [row for row in rows if row.params["pages"] == pages]
        assert all(row.value > 0 for row in of_pages)
        assert {row.impl: row.params["maps"] for row in of_pages} == {
            "own next request": 0,
            "another model's request": pages,
            "free pages": pages,
            "a copy of as many bytes": 0,
        }


def test_steps_that_need_pages_are_apart_from_those_that_take_them(harness: ModuleType) -> None:
    benchmark = __import__("virtual_growth")
    times = [float(length) for length in range(1, 49)]  # each step's length for its time
    found = benchmark.Growth.of([times, times], maps=5, ahead=2)
    assert found.steps == times * 2 and found.maps == 5
    assert found.needing == [17.0, 33.0] * 2
    assert found.taking == [15.0, 31.0, 47.0] * 2
    assert benchmark.Growth.of([times]).taking == []


def test_the_paged_allocator_beside_it_is_one(harness: ModuleType) -> None:
    paged = __import__("virtual_growth").PagedAllocator(8)
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
