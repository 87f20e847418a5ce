"""Paged caches whose requests may share pages; `runtime.composed` plans them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warploom.dsl.formats import Composed as Declared
from warploom.runtime.formats.base import Floats
from warploom.runtime.formats.lists import Int32s
from warploom.runtime.formats.paged import Pages


class Composed(Pages[Declared]):
    """See `warploom.Composed`."""

    def _share(
        self,
        rng: np.random.Generator,
        tables: Sequence[Int32s],
        k: Sequence[Floats],
        v: Sequence[Floats],
    ) -> None:
        """Requests begin as an earlier one does, for any number of full pages."""
        size = self.declared.page_size
        for i in range(1, len(tables)):
            j = int(rng.integers(i))
            full = min(len(k[i]), len(k[j])) // size
            shared = int(rng.integers(full // 2, full + 1))
            tables[i][:shared] = tables[j][:shared]
            for tokens in (k, v):
                tokens[i][: shared * size] = tokens[j][: shared * size]
