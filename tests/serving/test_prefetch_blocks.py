"""What of matrices a budget takes: by rows and by columns, no byte twice and none of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warploom.prefetch_errors import HasGaps
from warploom.serving.prefetch.blocks import (
    GRANULE,
    Block,
    first_columns,
    first_rows,
    matrix_of,
    reached,
    rows_of,
    within,
)

BEGIN = 1 << 20
MATRICES = st.builds(
    lambda size, rows, gap: Block(BEGIN, size, rows, size + gap),
    st.integers(1, 3000), st.integers(1, 20), st.integers(0, 300),
)  # fmt: skip


def bytes_of(blocks: list[Block]) -> list[int]:
    """All addresses, in order."""
    rows = ((x, row) for x in blocks for row in range(x.rows))
    return [x.address + row * x.stride + at for x, row in rows for at in range(x.bytes)]


@given(matrix=MATRICES, most=st.integers(1, 70_000))
def test_the_first_rows_are_the_first_bytes(matrix: Block, most: int) -> None:
    assert bytes_of(first_rows(matrix, most)) == bytes_of([matrix])[:most]


@given(matrix=MATRICES, most=st.integers(GRANULE, 70_000))
def test_the_first_columns_are_as_many_of_each_row(matrix: Block, most: int) -> None:
    asked = bytes_of(first_columns(matrix, most))
    assert len(asked) == len(set(asked)) <= most
    assert set(asked) <= set(bytes_of([matrix]))
    row, at = np.divmod(np.array(asked) - BEGIN, matrix.stride)
    widths = np.bincount(row, minlength=matrix.rows)
    for number, width in enumerate(widths.tolist()):
        assert sorted(at[row == number].tolist()) == list(range(width))  # from the begin of a row
    if most >= matrix.size:
        assert len(asked) == matrix.size
        return
    assert (np.diff(widths) <= 0).all() and widths[0] - widths[-1] <= GRANULE
    whole = np.minimum(-(-widths // GRANULE) * GRANULE, matrix.bytes)
    assert (widths == whole).all()
    assert most - len(asked) < GRANULE * (1 if matrix.bytes % GRANULE == 0 else matrix.rows + 1)


def test_less_than_a_granule_is_of_the_first_row() -> None:
    matrix = Block(BEGIN, 4096, 8, 4096)
    assert first_columns(matrix, 300) == [Block(BEGIN, 300)]
    assert first_columns(matrix, 3 * GRANULE) == [Block(BEGIN, GRANULE, 3, 4096)]
    assert first_columns(matrix, 19 * GRANULE + 1) == [
        Block(BEGIN, 2 * GRANULE, 8, 4096),
        Block(BEGIN + 2 * GRANULE, GRANULE, 3, 4096),
    ]


@pytest.mark.parametrize("columns", [False, True])
def test_only_the_last_of_several_is_cut_off(columns: bool) -> None:
    first, second, third = (Block(at * BEGIN, 2048, 4, 2048) for at in (1, 2, 3))
    most = 8192 + 4 * GRANULE
    last = Block(2 * BEGIN, GRANULE, 4, 2048) if columns else Block(2 * BEGIN, 4 * GRANULE)
    assert within([first, second, third], most, columns) == [Block(BEGIN, 8192), last]
    assert reached([first, second, third], most) == [first, second]
    assert reached([first, second, third], 8192) == [first]


X = torch.zeros(6, 512, 4)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (X, (16, 3072, 16)),
        (X.permute(1, 2, 0), (16, 3072, 16)),
        (X[0], (16, 512, 16)),
        (X.view(6, 2048), (8192, 6, 8192)),
        (X.view(6, 2048)[:, :100], (400, 6, 8192)),
        (X.view(6, 2048).t()[5:105], (400, 6, 8192)),
        (X.view(6, 2048)[::2, 32:], (8064, 3, 16384)),
        (X.view(2, 3, 2048)[:, :, :64], (256, 6, 8192)),
        (X[1:2, 3:4, 2:3], (4, 1, 4)),
        (X[:0], (0, 1, 0)),
        (X.view(-1)[7:19], (48, 1, 48)),
    ],
)
def test_tensors_as_rows(tensor: torch.Tensor, expected: tuple[int, int, int]) -> None:
    assert rows_of(tensor) == expected
    assert matrix_of(tensor, "x") == Block(tensor.data_ptr(), *expected)


@pytest.mark.parametrize(
    "tensor",
    [
        X.view(6, 2048)[:, :31],  # rows of less than a line
        X.view(-1)[::2],
        X[:, ::2],
        X.view(2, 3, 2048)[:, :2, :64],  # not equally far apart
        X[0, 0].expand(3, 4),
        X.view(-1).as_strided((3, 64), (32, 1)),  # rows that overlap
    ],
)
def test_what_has_gaps(tensor: torch.Tensor) -> None:
    assert rows_of(tensor) is None
    with pytest.raises(HasGaps, match="x has shape"):
        matrix_of(tensor, "x")


@given(data=st.data())
def test_dense_tensors_have_no_gaps_in_any_order_of_axes(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.zeros(shape, dtype=torch.float16).permute(*order)
    assert matrix_of(tensor, "x").joined == Block(tensor.data_ptr(), 2 * tensor.numel())
