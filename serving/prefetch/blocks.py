"""Memory that tensors fill, row by row, and the part of it that a budget takes.

A product reads all rows of its weights at once, along the sum. Of weights that are larger than what
L2 keeps, the first rows are then read from its begin to its end, and what is streamed meanwhile
drives most of them out; the first columns of all rows are read at its begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warploom.prefetch_errors import HasGaps
from warploom.runtime.launching.prefetch import LINE

# Bytes of a row that are asked for together: what a warp of a product loads at once, 16 bytes for
# each thread. With less, part of that load would be no hit, and the warp would wait all the same.
GRANULE = 512


class Block(NamedTuple):
    """Rows of memory, as far apart as each other.

    Attributes:
        address: of the first row.
        bytes: of a row.
        rows: how many.
        stride: bytes from row to row.
    """

    address: int
    bytes: int
    rows: int = 1
    stride: int = 0

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.bytes

    @property
    def joined(self) -> Block:
        """The same memory, in one row where nothing lies between the rows."""
        return Block(self.address, self.size) if self.stride == self.bytes else self


def matrix_of(tensor: torch.Tensor, name: str) -> Block:
    """A tensor as rows along its axis without a stride, whatever the order of its axes.

    Raises:
        HasGaps: its rows are not equally far apart, overlap, or have gaps or less than a line of
            128 bytes while other memory lies between them.
    """
    found = rows_of(tensor)
    if found is None:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        raise HasGaps(name=name, shape=shape, strides=strides)
    size, rows, stride = found
    return Block(tensor.data_ptr(), size, rows, stride)


def rows_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Bytes of a row, rows, and bytes from row to row; None where `matrix_of` refuses.

    It takes tensors without memory, as compilers have them, too.
    """
    if tensor.numel() == 0:
        return 0, 1, 0
    sized = zip(tensor.stride(), tensor.shape, strict=True)
    axes = sorted(((step, n) for step, n in sized if n > 1), reverse=True)
    columns = axes.pop()[1] if axes and axes[-1][0] == 1 else 1
    rows, stride = 1, columns
    for step, n in reversed(axes):
        if rows > 1 and step != rows * stride:
            return None
        rows, stride = rows * n, stride if rows > 1 else step
    element = tensor.element_size()
    if stride < columns or (stride > columns and rows > 1 and columns * element < LINE):
        return None
    return columns * element, rows, stride * element


def first_rows(matrix: Block, most: int) -> list[Block]:
    """The first bytes of a matrix, row by row."""
    block = matrix.joined
    if most >= block.size:
        return [block]
    rows, rest = divmod(most, block.bytes)
    last = Block(block.address + rows * block.stride, rest)
    return [x for x in (block._replace(rows=rows), last) if x.size]


def first_columns(matrix: Block, most: int) -> list[Block]:
    """The first columns of all rows: as many granules of each, and of the first rows one more.

    Where there is not a granule for each row, the first rows have one. Less than a granule is of
    the first row.
    """
    if most >= matrix.size or most < GRANULE:
        return first_rows(matrix, most)
    each, more = divmod(most // GRANULE, matrix.rows)
    width = each * GRANULE
    left = min(GRANULE, matrix.bytes - width)
    taken = matrix._replace(bytes=width)
    next_columns = Block(matrix.address + width, left, more, matrix.stride)
    return [x for x in (taken, next_columns) if x.size]


def reached(matrices: Sequence[Block], most: int) -> list[Block]:
    """Those of several matrices, in their order, that a budget takes, the last in part."""
    before = 0
    found = []
    for matrix in matrices:
        if before >= most:
            break
        found.append(matrix)
        before += matrix.size
    return found


def within(matrices: Sequence[Block], most: int, columns: bool) -> list[Block]:
    """What a budget of at least a byte takes of matrices, in their order; the last is cut off.

    Args:
        matrices: in the order in which they will be read.
        most: bytes.
        columns: the last is cut to its first columns, and not to its first rows.
    """
    *whole, last = reached(matrices, most)
    cut = first_columns if columns else first_rows
    return [*(x.joined for x in whole), *cut(last, most - sum(x.size for x in whole))]
