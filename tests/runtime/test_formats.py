"""Plan arguments of each format: what they lower to, and every mistake in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from warploom.dsl.types.formats import BlockSparse, Dense, Paged, Ragged
from warploom.errors import (
    ArgumentError,
    BadIndptr,
    BadLength,
    IndexOutOfRange,
    WrongDType,
    WrongShape,
)
from warploom.runtime.calls.blocks import block_rows
from warploom.runtime.formats import make_batch


def column(batch: Any, name: str) -> list[int]:
    values: list[int] = batch.segments[name].tolist()
    return values


def test_ragged_requests_follow_one_another() -> None:
    batch = make_batch(Ragged(), [0, 2, 2, 5], [0, 7, 9, 9])
    assert column(batch, "q_row") == [0, 2, 2]
    assert column(batch, "num_q") == [2, 0, 3]
    assert column(batch, "kv_row") == [0, 7, 9]
    assert column(batch, "kv_len") == column(batch, "kv_count") == [7, 2, 0]
    assert (batch.q_rows, batch.kv_extent, batch.sizes.max_kv_len) == (5, 9, 7)


def test_dense_requests_have_a_batch_entry_each() -> None:
    batch = make_batch(Dense(), [0, 4, 8], [0, 3, 9])
    assert column(batch, "q_row") == [0, 0]
    assert column(batch, "kv_block") == [0, 1]
    assert (batch.q_rows, batch.kv_extent) == (4, 6)


def test_pages_count_only_their_tokens() -> None:
    batch = make_batch(Paged(4), [0, 1, 2, 3], [0, 2, 2, 5], [7, 1, 0, 3, 9, 99], [3, 0, 4])
    assert batch.kv_lens.tolist() == [7, 0, 12]
    assert column(batch, "index_begin") == [0, 2, 2]
    assert batch.indices.tolist() == [7, 1, 0, 3, 9]  # what lies behind kv_indptr[-1] is unused
    assert batch.kv_extent == 10


def test_block_rows_become_segments_with_ascending_columns() -> None:
    batch = make_batch(
        BlockSparse(block=(2, 4)), [0, 3, 5], [0, 2, 3, 3], [2, 0, 1], kv_lens=[10, 5]
    )
    assert column(batch, "batch") == [0, 0, 1]
    assert column(batch, "q_row") == [0, 2, 3]
    assert column(batch, "q_idx") == [0, 2, 0]
    assert column(batch, "num_q") == [2, 1, 2]
    assert column(batch, "kv_row") == [0, 0, 10]
    assert column(batch, "kv_count") == [6, 4, 0]  # the last block of 10 keys holds 2
    assert batch.indices.tolist() == [0, 2, 1]


def test_torch_numpy_and_lists_are_the_same() -> None:
    wanted = make_batch(Ragged(), [0, 2], [0, 3]).segments
    for array in (np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        found = make_batch(Ragged(), array([0, 2]), array([0, 3])).segments
        assert (found == wanted).all()


INDPTR_MISTAKES = [
    ([0, 3, 2], "decreases"),
    ([1, 3, 4], r"kv_indptr starts with 1\. .* must start at 0"),
    ([0, 3], "qo_indptr has 3 entries, of 2 requests; kv_indptr has 2, of 1"),
    ([0, 3, 4, 5], "kv_indptr has 4, of 3"),
    ([], "is empty"),
]


@pytest.mark.parametrize(("kv_indptr", "reason"), INDPTR_MISTAKES)
def test_a_wrong_indptr_is_refused(kv_indptr: list[int], reason: str) -> None:
    with pytest.raises(BadIndptr, match=reason):
        make_batch(Ragged(), [0, 1, 2], kv_indptr)


def test_the_first_indptr_decides_how_many_requests_there_are() -> None:
    with pytest.raises(BadIndptr, match=r"qo_indptr is empty. .* one entry more than there are"):
        make_batch(Ragged(), [], [0])


def test_a_wrong_indptr_says_where() -> None:
    with pytest.raises(BadIndptr, match=r"qo_indptr decreases at index 2, from 5 to 4\."):
        make_batch(Ragged(), [0, 5, 4], [0, 1, 2])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([0.0, 1.0], WrongDType),
        ([[0, 1]], WrongShape),
        ([0, 2**40], ArgumentError),
        ("0 1", ArgumentError),
    ],
)
def test_an_indptr_of_another_kind_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_batch(Ragged(), value, [0, 1])


PAGED = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 3], "kv_indices": [4, 5, 6]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_indices": [4, 5]}, WrongShape),
        ({"kv_indices": [4, -1, 6]}, IndexOutOfRange),
        ({"last_page_len": [1]}, WrongShape),
        ({"last_page_len": [0, 1]}, BadLength),
        ({"last_page_len": [1, 5]}, BadLength),
        ({"last_page_len": None}, ArgumentError),
        ({"kv_indices": None}, ArgumentError),
        ({"kv_lens": [1, 2]}, ArgumentError),
    ],
)
def test_wrong_page_tables_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make_batch(Paged(4), **{**PAGED, "last_page_len": [1, 2], **changes})


def test_affine_formats_take_no_indices() -> None:
    with pytest.raises(ArgumentError, match="Ragged format does not take"):
        make_batch(Ragged(), [0, 1], [0, 1], kv_indices=[0])


def test_dense_queries_have_one_length() -> None:
    with pytest.raises(BadLength, match=r"q_len\[0\] is 1; expected 2"):
        make_batch(Dense(), [0, 1, 3], [0, 1, 2])


BLOCKS = {"qo_indptr": [0, 4], "kv_indptr": [0, 1, 3], "kv_indices": [0, 0, 1], "kv_lens": [8]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_indptr": [0, 1]}, BadIndptr),
        ({"kv_indices": [0, 0, 2]}, IndexOutOfRange),
        ({"kv_indices": [0, 1, 1]}, ArgumentError),
        ({"kv_lens": [8, 8]}, WrongShape),
        ({"kv_lens": [-8]}, BadLength),
        ({"kv_lens": None}, ArgumentError),
    ],
)
def test_wrong_block_rows_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        make_batch(BlockSparse(block=(2, 4)), **{**BLOCKS, **changes})


def test_boolean_masks_become_block_rows() -> None:
    blocks = np.array([[1, 0, 1], [0, 0, 0]], bool)
    mask = np.kron(blocks, np.ones((2, 4), bool))[:3, :10]  # last blocks cut
    found = block_rows(mask, (2, 4))
    assert {name: array.tolist() for name, array in found.items()} == {
        "qo_indptr": [0, 3],
        "kv_indptr": [0, 2, 2],
        "kv_indices": [0, 2],
        "kv_lens": [10],
    }
    several = block_rows([mask, torch.ones(2, 4, dtype=torch.bool)], (2, 4))
    assert several["qo_indptr"].tolist() == [0, 3, 5]
    assert several["kv_indices"].tolist() == [0, 2, 0]


def test_sparse_bsr_tensors_become_block_rows() -> None:
    dense = torch.zeros(4, 6)
    dense[:2, 3:] = 1
    dense[2:, :3] = 1
    found = block_rows(dense.to_sparse_bsr((2, 3)))
    assert found["kv_indptr"].tolist() == [0, 1, 2]
    assert found["kv_indices"].tolist() == [1, 0]
    with pytest.raises(ArgumentError, match="blocks are"):
        block_rows(dense.to_sparse_bsr((2, 3)), (2, 2))


def test_a_block_that_is_partly_visible_is_refused() -> None:
    mask = np.ones((4, 4), bool)
    mask[1, 3] = False
    with pytest.raises(ArgumentError, match=r"block \(0, 1\) of size \(2, 2\) is partly visible"):
        block_rows(mask, (2, 2))
    with pytest.raises(ArgumentError, match="block size"):
        block_rows(mask)
    with pytest.raises(WrongShape):
        block_rows(mask[0], (2, 2))


def test_lengths_above_int32_are_refused() -> None:
    pages = 2**22 + 1
    with pytest.raises(BadLength, match=rf"kv_len\[1\] is {2**32 + 5}; expected at most"):
        make_batch(Paged(1024), [0, 1, 2], [0, 0, pages], np.zeros(pages, np.int32), [0, 5])
    with pytest.raises(BadLength, match=rf"the sum of kv_lens\[7\] is {2**31}"):
        counts = [0] * 9
        make_batch(BlockSparse((4, 4)), range(9), counts, [], kv_lens=[2**28] * 8)


@pytest.mark.parametrize(
    ("kv_format", "arguments", "name"),
    [
        (Dense(), ([0, 1, 2**31 - 1], [0, 1, 2]), "q_len"),
        (Ragged(), ([0, 1, 2], [0, 1, 2**28 + 2]), "kv_len"),
        (Ragged(), ([0, 1, 2**28 + 2], [0, 1, 2]), "q_len"),
        (Ragged(), ([0, 2**28, 2**28 + 1], [0, 1, 2]), "qo_indptr.*query rows in all"),
    ],
)
def test_lengths_beyond_those_of_positions_are_refused(
    kv_format: Any, arguments: Any, name: str
) -> None:
    with pytest.raises(BadLength, match=name):
        make_batch(kv_format, *arguments)


def test_a_batch_keeps_no_array_of_the_callers() -> None:
    indices, lens = np.array([2, 0], np.int32), np.array([12], np.int32)
    paged = make_batch(Paged(4), [0, 1], [0, 2], indices, [3])
    sparse = make_batch(BlockSparse((1, 4)), [0, 1], [0, 2], indices, kv_lens=lens)
    indices[:], lens[:] = 1, 5
    assert paged.indices.tolist() == [2, 0]
    assert sparse.indices.tolist() == [0, 2]
    assert sparse.kv_lens.tolist() == [12]
