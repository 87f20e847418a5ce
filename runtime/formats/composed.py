"""Paged caches whose requests may share pages; `runtime.planning.composed` plans them."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.dsl.types.formats import Composed as Declared
from warploom.runtime.formats.base import Drawn
from warploom.runtime.formats.lists import Int32s
from warploom.runtime.formats.paged import Pages


class Composed(Pages[Declared]):
    """See `warploom.Composed`."""

    def _share(self, drawn: Drawn, tables: Sequence[Int32s]) -> None:
        """Requests begin as an earlier one does, for any number of full pages."""
        size, rng, lengths = self.declared.page_size, drawn.rng, drawn.lengths
        for i in range(1, len(tables)):
            j = int(rng.integers(i))
            full = min(lengths[i], lengths[j]) // size
            shared = int(rng.integers(full // 2, full + 1))
            tables[i][:shared] = tables[j][:shared]
            for tokens in (drawn.k, drawn.v):
                tokens[i][: shared * size] = tokens[j][: shared * size]
