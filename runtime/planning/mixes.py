"""Which batches get two roles automatically: mixed decodes and prefills where two roles pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from warploom.codegen.choice.role_choice import FULL_LANES, MANY_ROWS
from warploom.codegen.choice.role_cost import Forecast, RoleCost, forecast, role_cost
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.formats.batch import RoleSizes, RoleTiles, Sizes
from warploom.runtime.planning.visibility import Heads

_FEWER_LANES, _SMALL_GROUP = 64, 8  # the other heads for which kernels of graphs were measured
_PREFILL_ROWS = 256  # rows of a request; one with fewer may be drafts to verify
# Rows of the mean request: with fewer all may be drafts, with more most rows belong to prefills.
_FEWEST_ROWS, _FEW_ROWS = 8, 64
# Limits for device planners: for this many they need 180 KB of shared memory.
_MOST_REQUESTS, _MOST_FUSED = 1024, 2048 * 128


class Mix(NamedTuple):
    """A kernel that a mixed batch may get.

    Attributes:
        choice: its tile, of two roles.
        sizes: tile sizes by which key tiles of batches are counted.
        cost: prices of its key tiles.
    """

    choice: TileChoice
    sizes: RoleSizes
    cost: RoleCost


class Mixes:
    """Choices for the mixed batches of one wrapper; its other batches get one tile.

    Attributes:
        all: kernels that a mixed batch may get; the first that pays is taken.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads, choices: Sequence[TileChoice]) -> None:
        self.all = [Mix(one, _sizes(one.tile), role_cost(spec, one.tile)) for one in choices]
        self._heads = heads

    def choice(self, ctas: int, count: Callable[[RoleSizes], RoleTiles]) -> TileChoice | None:
        """The first choice that is faster than one tile; None if none is.

        Args:
            ctas: CTAs that may get work.
            count: counts key tiles of both roles in a batch that `may_be_mixed`.
        """
        for mix in self.all:
            if self.forecast(mix, ctas, count).pays:
                return mix.choice
        return None

    def forecast(self, mix: Mix, ctas: int, count: Callable[[RoleSizes], RoleTiles]) -> Forecast:
        """Times of a batch with one of these kernels, and with one tile; see `choice`."""
        heads = self._heads.num_kv
        prefills, decodes = count(mix.sizes)
        return forecast(mix.cost, prefills * heads, decodes * heads, ctas)


def may_be_mixed(sizes: Sizes, group_size: int) -> bool:
    """Whether a batch of these sizes can have prefills and decodes.

    False if requests have several segments (block rows), which share keys.
    """
    return (
        sizes.longest_q * group_size > MANY_ROWS
        and sizes.num_segments > 1
        and sizes.num_segments == sizes.num_requests
    )


def may_hold_prefills(requests: int, rows: int, group_size: int, lanes: int = FULL_LANES) -> bool:
    """Whether one kernel for all batches should have two roles.

    True if a prefill may come beside many requests of few rows: a tile for the mean request reads
    the keys of a prefill many times, and a tile for prefills computes rows that decodes lack.

    Args:
        requests, rows: requests and query rows of the largest batch.
        group_size: query heads of a key/value head.
        lanes: lanes of a head; others than 128, and 64 in groups of up to 8, were not measured,
            and get one tile.
    """
    return (
        (lanes == FULL_LANES or (lanes == _FEWER_LANES and group_size <= _SMALL_GROUP))
        and 1 < requests <= _MOST_REQUESTS
        and rows - requests >= _PREFILL_ROWS
        and _FEWEST_ROWS * requests <= rows <= _FEW_ROWS * requests
        and rows * group_size <= _MOST_FUSED
    )


def _sizes(tile: TileConfig) -> RoleSizes:
    assert tile.decode is not None  # it has two roles
    return RoleSizes(tile.decode.rows, tile.rows, tile.keys, tile.decode.keys)
