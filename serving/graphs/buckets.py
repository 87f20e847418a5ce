"""Numbers of rows that there are captures for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from warploom.errors import ArgumentError
from warploom.runtime.declaring.declare import checked_count


class Buckets:
    """Rows that batches are padded up to.

    Attributes:
        sizes: in rising order.
    """

    def __init__(self, sizes: Iterable[int] | None, most: int) -> None:
        """Take sizes, or powers of two and `most` itself.

        Raises:
            ArgumentError: none, or one that is no count of rows up to `most`.
        """
        checked_count("Bounds.max_q_rows", most)
        if sizes is None:
            sizes = [*(2**i for i in range(most.bit_length())), most]
        if not isinstance(sizes, Iterable) or isinstance(sizes, str):
            raise ArgumentError(name="buckets", reason=f"is {sizes!r}; expected several, as [1, 4]")
        given = list(sizes)
        for size in given:
            checked_count("buckets", size, most)
        found = sorted(set(given))
        if not found:
            raise ArgumentError(name="buckets", reason="is empty; expected numbers of rows")
        self.sizes = tuple(found)

    def of(self, rows: int) -> int | None:
        """The smallest that holds so many rows; None beyond the largest."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if place < len(self.sizes) else None
