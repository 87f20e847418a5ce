"""Index arrays are found where they lie; only what is no int32 list on the host is copied."""

from __future__ import annotations

import re
from ctypes import c_int32
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError, WrongDType, WrongShape
from warploom.runtime.tensors.index_arrays import IndexReader

NAMES = "qo_indptr", "kv_indices"
PLAIN = torch.arange(6, dtype=torch.int32)
READ_ONLY = np.arange(5, dtype=np.int32)
READ_ONLY.flags.writeable = False


def values(address: int, count: int) -> list[int]:
    return list((c_int32 * count).from_address(address)) if count else []


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        (PLAIN, True),
        (PLAIN[2:4], True),
        (PLAIN[:0], True),
        (PLAIN[::2], False),
        (PLAIN[::5][:1], True),  # contiguous, with a stride that longer ones would not have
        (PLAIN.long(), False),
        (PLAIN.numpy(), True),
        (PLAIN.numpy()[::2], False),
        (PLAIN.numpy().astype(np.int64), False),
        (np.empty(0, np.int32), True),
        (READ_ONLY, True),
        ([3, 1, 2], False),
    ],
    ids=range(12),
)
def test_arrays_are_read_where_they_lie(given: Any, stays: bool) -> None:
    read = IndexReader(*NAMES)
    for arrays in ((given, given), (PLAIN, PLAIN), (given, PLAIN), (given, given), (PLAIN, given)):
        found = read(*arrays)
        for array, kept, address, count in zip(arrays, *found, strict=True):
            assert values(address, count) == [int(x) for x in array]
            assert (kept is array) or array is not given or not stays


def test_page_numbers_may_stay_elsewhere() -> None:
    read, pages = IndexReader(*NAMES), torch.zeros(7, dtype=torch.int32, device="meta")
    for _ in range(2):
        found = read(PLAIN, pages)
        assert found.kept == (PLAIN, pages)
        assert found.addresses[1] == 0
        assert tuple(found.counts) == (6, 7)


@pytest.mark.parametrize(("wrong", "error"), [([1.5], WrongDType), ([[1]], WrongShape)])
def test_wrong_arrays_are_refused_by_name(wrong: Any, error: type[Exception]) -> None:
    read = IndexReader(*NAMES)
    read(PLAIN, PLAIN)
    with pytest.raises(error, match="kv_indices"):
        read(PLAIN, wrong)
    with pytest.raises(ArgumentError, match=r"kv_indices: has lists .* give one flat list"):
        read(PLAIN, [[7, 2, 4], [0, 9]])


def test_ranges_are_lists() -> None:
    wrapper = wl.AttentionWrapper(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
                                  device="cpu", backend="reference")  # fmt: skip
    wrapper.plan(range(4), range(0, 20, 5))
    q, k = torch.zeros(3, 4, 64), torch.zeros(15, 2, 64)
    assert wrapper.run(q, (k, k)).shape == q.shape


def test_a_block_table_is_told_how_to_lie() -> None:
    wrapper = wl.AttentionWrapper(
        kv_format=wl.Paged(4), num_q_heads=2, head_dim=16, device="cpu", backend="reference"
    )
    table, pages = torch.tensor([[7, 2, 0], [4, 0, 0]]), torch.tensor([2, 1])
    given: Any = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 3], "last_page_len": [4, 1]}
    with pytest.raises(WrongShape, match=r"one dimension\. Of a block table") as caught:
        wrapper.plan(**given, kv_indices=table)
    (told,) = re.findall(r"table\[.*\]\]", str(caught.value))
    flat = eval(told, {"torch": torch, "table": table, "pages": pages})
    assert flat.tolist() == [7, 2, 4]
    wrapper.plan(**given, kv_indices=flat)
