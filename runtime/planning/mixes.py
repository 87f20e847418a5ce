"""Which batches get two roles by themselves: those of decodes and prefills where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from warploom.codegen.choice.role_choice import FULL_LANES, MANY_ROWS
from warploom.codegen.choice.role_cost import Forecast, RoleCost, forecast, role_cost
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.formats.batch import RoleSizes, RoleTiles, Sizes
from warploom.runtime.planning.visibility import Heads

_PREFILL_ROWS = 256  # of a request: fewer may be drafts that are to be verified
# Of the mean request: with fewer all may be drafts, and with more most rows are those of prefills.
_FEWEST_ROWS, _FEW_ROWS = 8, 64
# Planners of a device work in its shared memory, 180 KB of it for so many of these.
_MOST_REQUESTS, _MOST_FUSED = 1024, 2048 * 128


class Mix(NamedTuple):
    """A kernel that a mixed batch may get.

    Attributes:
        choice: its tile, of two roles.
        sizes: by which batches are counted.
        cost: of its key tiles.
    """

    choice: TileChoice
    sizes: RoleSizes
    cost: RoleCost


class Mixes:
    """Mixed batches of one wrapper, whose others get one tile.

    Attributes:
        all: what a mixed batch may get; the first that pays is taken.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads, choices: Sequence[TileChoice]) -> None:
        self.all = [Mix(one, _sizes(one.tile), role_cost(spec, one.tile)) for one in choices]
        self._heads = heads

    def choice(self, ctas: int, count: Callable[[RoleSizes], RoleTiles]) -> TileChoice | None:
        """The first one that is faster than one tile; None if none is.

        Args:
            ctas: that may get work.
            count: what a batch that `may_be_mixed` has of both roles.
        """
        for mix in self.all:
            if self.forecast(mix, ctas, count).pays:
                return mix.choice
        return None

    def forecast(self, mix: Mix, ctas: int, count: Callable[[RoleSizes], RoleTiles]) -> Forecast:
        """How long a batch takes by one of these, and by one tile; see `choice`."""
        heads = self._heads.num_kv
        prefills, decodes = count(mix.sizes)
        return forecast(mix.cost, prefills * heads, decodes * heads, ctas)


def may_be_mixed(sizes: Sizes, group_size: int) -> bool:
    """Whether a batch of these sizes can have prefills and decodes.

    Not where requests have several segments (block rows), which share keys.
    """
    return (
        sizes.longest_q * group_size > MANY_ROWS
        and sizes.num_segments > 1
        and sizes.num_segments == sizes.num_requests
    )


def may_hold_prefills(requests: int, rows: int, group_size: int, lanes: int = FULL_LANES) -> bool:
    """Whether one kernel for all batches is to have two roles.

    It is where a prefill may come beside many requests of few rows: a tile for the mean request
    reads the keys of a prefill often, and one for prefills computes rows that decodes do not have.

    Args:
        requests, rows: of the largest batch.
        group_size: query heads of a key/value head.
        lanes: of a head; for others than are measured there is one tile.
    """
    return (
        lanes == FULL_LANES
        and 1 < requests <= _MOST_REQUESTS
        and rows - requests >= _PREFILL_ROWS
        and _FEWEST_ROWS * requests <= rows <= _FEW_ROWS * requests
        and rows * group_size <= _MOST_FUSED
    )


def _sizes(tile: TileConfig) -> RoleSizes:
    assert tile.decode is not None  # it has two roles
    return RoleSizes(tile.decode.rows, tile.rows, tile.keys, tile.decode.keys)
