"""Plans of two roles that share, claim and cut what is too short for that on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from warploom.scheduler.composed import sharing
from warploom.scheduler.model.roles import RolePrices


@contextmanager
def short_ones_count(are_cut: bool) -> Iterator[None]:
    """What tests have is shorter than what is worth sharing, claiming or cutting on a GPU."""

    def tiles(prices: RolePrices, keys: int) -> int:
        return 0 if are_cut else -(-prices.shortest_cut // keys)

    with (
        mock.patch.object(RolePrices, "least_claim", lambda _, model, keys: model.least_slice),
        mock.patch.object(RolePrices, "cut_tiles", tiles),
        mock.patch.multiple(sharing, PER_ITEM=0, PER_ROW=0),
        mock.patch.dict(os.environ, WARPLOOM_VERIFY_PLANS="1"),
    ):
        yield
