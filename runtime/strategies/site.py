"""The layout and the constants with which a native planner plans for one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from warploom.codegen.planner_source import DEAL_SITE, LIST_SITE, OUTPUTS, ROLE_SITE, SITE
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.runtime.formats import format_of
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.scratch import (
    deal_scratch_bytes,
    list_scratch_bytes,
    role_scratch_bytes,
    scratch_bytes,
)
from warploom.scheduler.model.bounds import INT32_MAX, Bounds
from warploom.scheduler.model.constants import CTA_BITS
from warploom.scheduler.model.cost import CostModel
from warploom.scheduler.model.roles import MOST_CTAS, RolePrices
from warploom.scheduler.partition.stream_k import Grid
from warploom.scheduler.plans.capacity import Capacity

_MOST_LOAD = 2 ** (63 - CTA_BITS)  # limit of a load, which levelling.hpp packs with a CTA's number
_MOST_PRICE = 2**62  # limit of the other planners' arithmetic
_MOST_SECTIONS = 2**31  # limit of sections, whose number `sort_by_section` packs with an item's


@dataclass(frozen=True)
class LongestFirst:
    """Parameters of assigning tiles longest first, as hosts do; prefills of two roles may be dealt.

    Attributes:
        piece_keys: cost of a partial result, in keys.
        cached_keys: keys of one head that the cache holds; None: all. Plans of two roles take this
            from their prices.
    """

    piece_keys: int
    cached_keys: int | None


@dataclass(frozen=True)
class Site:
    """What plans for one kernel into one layout have in common.

    Attributes:
        room: layout of the plan.
        active_ctas: CTAs that may get work.
        numbers: `PlannerSpec.site` of `codegen.planner_source`.
        max_tiles: most query tiles of batches within the room's bounds.
        slices: slices of a line, one per CTA; with two roles, two per active CTA, by which a device
            planner gets its number of threads.
        scratch: bytes of scratch memory of a planner.
        is_in_range: numbers of CTAs and loads are within the range of compiled planners.
    """

    room: Capacity
    active_ctas: int
    numbers: tuple[int, ...]
    max_tiles: int
    slices: int
    scratch: int
    is_in_range: bool

    @classmethod
    def of(
        cls,
        kv_format: KVFormat,
        heads: Heads,
        tile: TileConfig,
        room: Capacity,
        active_ctas: int,
        prices: RolePrices | None = None,
        longest_first: LongestFirst | None = None,
    ) -> Site:
        """The site of a format with a `native_storage`, heads, and the tile of a kernel.

        Tiles of two roles need prices. Without `longest_first` Stream-K cuts lines of items, also
        of prefills: none are dealt.
        """
        storage, bounds = format_of(kv_format).native_storage, room.bounds
        assert storage is not None  # other formats have no native planner
        grid = Grid.of(active_ctas, heads.num_kv)
        cost = CostModel.for_stream_k(tile.rows, tile.keys)  # with two roles: of prefills on a line
        if longest_first is not None and tile.decode is None:
            cost = CostModel.of(tile.rows, tile.keys, longest_first.piece_keys)
        tiles = bounds.max_q_rows * heads.group_size // tile.rows + bounds.max_requests
        numbers = _in_order(
            SITE, storage=storage, page_size=kv_format.block_kv, max_requests=bounds.max_requests,
            max_tiles=tiles, num_ctas=room.num_ctas, lines=grid.lines, heads_per_line=grid.heads,
            slices=grid.slices, rows=tile.rows, keys=tile.keys, group_size=heads.group_size,
            num_q_heads=heads.num_q, num_kv_heads=heads.num_kv, fixed=cost.fixed,
            per_tile=cost.per_tile, grain=cost.grain, partial=cost.partial,
        )  # fmt: skip
        work = _Work(bounds, heads, tiles, room.num_ctas, active_ctas)
        if tile.decode is not None:
            assert prices is not None
            own = _of_roles(work, tile, prices, longest_first)
        elif longest_first is not None:
            own = _of_longest_first(work, tile, cost, longest_first)
        else:
            own = _of_stream_k(work, tile, cost)
        numbers += own.numbers
        return cls(room, active_ctas, numbers, tiles, own.slices, own.scratch, own.is_in_range)

    @cached_property
    def _at(self) -> dict[int, tuple[int, ...]]:
        return {}

    def outputs(self, address: int) -> tuple[int, ...]:
        """Addresses of the sections that OUTPUTS names."""
        if address not in self._at:  # few addresses: of a workspace, or of a ring of buffers
            self._at[address] = tuple(address + 4 * self.room.offsets[name] for name in OUTPUTS)
        return self._at[address]


def _in_order(fields: Sequence[tuple[str, str]], **numbers: int) -> tuple[int, ...]:
    """The named numbers, in the order in which planners take them."""
    assert len(numbers) == len(fields)  # a missing name raises KeyError
    return tuple(numbers[name] for name, _ in fields)


def _role_numbers(tile: TileConfig, active_ctas: int, prices: RolePrices) -> tuple[int, ...]:
    """Of ROLE_SITE."""
    decode = tile.decode
    assert decode is not None  # it has two roles
    cost = CostModel.for_stream_k(decode.rows, decode.keys)
    prefill_price, decode_price = prices.units
    return _in_order(
        ROLE_SITE, active_ctas=active_ctas, decode_rows=decode.rows, decode_keys=decode.keys,
        decode_fixed=cost.fixed, decode_per_tile=cost.per_tile, decode_grain=cost.grain,
        decode_partial=cost.partial, prefill_price=prefill_price, decode_price=decode_price,
        saturating=prices.saturating, shortest_cut=prices.cut_tiles(tile.keys),
        decode_claim=prices.least_claim(cost, decode.keys), cached_keys=prices.cached_keys or 0,
    )  # fmt: skip


def _deal_numbers(cost: CostModel, prices: RolePrices) -> tuple[int, ...]:
    """Of DEAL_SITE; `cost` is by which prefills are dealt."""
    return _in_order(
        DEAL_SITE, section_keys=prices.cached_keys or 0, deal_cost_fixed=cost.fixed,
        deal_cost_per_tile=cost.per_tile, deal_cost_grain=cost.grain,
        deal_cost_partial=cost.partial, deals_beside_decodes=int(prices.may_deal_beside_decodes),
    )  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """The largest batch to plan: `max_tiles` query tiles of each head."""

    bounds: Bounds
    heads: Heads
    max_tiles: int
    num_ctas: int
    active_ctas: int

    @property
    def items(self) -> int:
        return self.max_tiles * self.heads.num_kv

    @property
    def slices(self) -> int:
        """Slices of a line with one role."""
        return Grid.of(self.active_ctas, self.heads.num_kv).slices

    def longest(self, cost: CostModel, tile: TileConfig) -> int:
        """Cost of the longest item."""
        return cost.of_longest(self.bounds.max_kv_len, tile.keys)

    def fits_line(self, longest: int) -> bool:
        """Whether the length of all lines, or the price of all items, is in range: planners
        multiply it by numbers of CTAs."""
        return self.items * longest * self.active_ctas < _MOST_PRICE

    def fits_queue(self, cost: CostModel, tile: TileConfig, cached_keys: int | None) -> bool:
        """Whether loads of CTAs, and numbers of sections, are in range where tiles are dealt."""
        keys = self.bounds.max_requests * self.bounds.max_kv_len * self.heads.num_kv
        return (
            self.items * self.longest(cost, tile) < _MOST_LOAD
            and self.num_ctas <= MOST_CTAS
            and (cached_keys is None or keys // cached_keys < _MOST_SECTIONS)
        )


class _OfKind(NamedTuple):
    """What a site has of its own for a kind of planner; see `Site`.

    Attributes:
        numbers: behind those of `SITE`.
        scratch, slices, is_in_range: the site's.
    """

    numbers: tuple[int, ...]
    scratch: int
    slices: int
    is_in_range: bool


def _of_stream_k(work: _Work, tile: TileConfig, cost: CostModel) -> _OfKind:
    """Of one role, whose lines are cut."""
    slices = work.slices
    scratch = scratch_bytes(work.max_tiles, work.bounds.max_requests, slices)
    return _OfKind((), scratch, slices, work.fits_line(work.longest(cost, tile)))


def _of_longest_first(
    work: _Work, tile: TileConfig, cost: CostModel, longest_first: LongestFirst
) -> _OfKind:
    """Of one role, whose tiles are dealt."""
    slices, cached_keys = work.slices, longest_first.cached_keys
    sizes = work.max_tiles, work.bounds.max_requests, slices, work.heads.num_kv, work.num_ctas
    numbers = _in_order(LIST_SITE, active_ctas=work.active_ctas, section_keys=cached_keys or 0)
    is_in_range = work.fits_queue(cost, tile, cached_keys)
    return _OfKind(numbers, list_scratch_bytes(*sizes), slices, is_in_range)


def _of_roles(
    work: _Work, tile: TileConfig, prices: RolePrices, longest_first: LongestFirst | None
) -> _OfKind:
    """Of two roles, whose lines are cut; with `longest_first` prefills may be dealt instead."""
    bounds, slices = work.bounds, 2 * work.active_ctas
    numbers = _role_numbers(tile, work.active_ctas, prices)
    scratch = role_scratch_bytes(work.max_tiles, bounds.max_requests, work.active_ctas)
    is_in_range = work.fits_line(_longest_price(tile, prices, bounds.max_kv_len))
    is_in_range = is_in_range and max(prices.units) <= INT32_MAX  # planners take them as int
    if longest_first is None:
        return _OfKind(numbers, scratch, slices, is_in_range)
    cost = CostModel.of(tile.rows, tile.keys, longest_first.piece_keys)
    numbers += _deal_numbers(cost, prices)
    scratch += deal_scratch_bytes(
        work.max_tiles, bounds.max_requests, work.heads.num_kv, work.num_ctas
    )
    is_in_range = is_in_range and work.fits_queue(cost, tile, prices.cached_keys)
    return _OfKind(numbers, scratch, slices, is_in_range)


def _longest_price(tile: TileConfig, prices: RolePrices, max_kv_len: int) -> int:
    """Price of the longest item of the first role plus that of the second."""
    roles = tile, tile.decode
    return sum(
        unit * CostModel.for_stream_k(role.rows, role.keys).of_longest(max_kv_len, role.keys)
        for role, unit in zip(roles, prices.units, strict=True)
        if role is not None
    )
