"""Plans batches like the previous one in as few calls as possible.

Consecutive batches of a server often differ only in lengths and page numbers: the same planner
plans them for the same kernel into the same layout. The conditions for that are kept as limits on
the numbers of a batch, so that compiled code (`replan.hpp`) can check them and plan at once. All
other batches, and all invalid ones, take the long way through `planner.Planner`. For a batch within
the limits the long way would make the same plan.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cached_property

from warploom.codegen.choice.role_choice import MANY_ROWS
from warploom.codegen.choice.role_cost import SHIPPED
from warploom.runtime.formats.batch import Sizes
from warploom.runtime.planning.mixes import Mix, may_be_mixed
from warploom.runtime.planning.rules import Rules
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.size_classes import SizeClass
from warploom.scheduler.model.bounds import INT32_MAX
from warploom.scheduler.model.constants import SHARING_TILES
from warploom.scheduler.model.problem import Partition

_GUARD = struct.Struct("=3q23i4x")  # warploom::ReplanGuard
_UNASKED = (0,) * 3, (1, 1, 1, 1, 0), (0,) * 4  # values if it is not checked that two roles pay


class Limits:
    """Limits of the numbers of batches that one guard admits.

    Attributes:
        least, most: limits by name: requests, then the members of `warploom::Lengths` in its order.
    """

    def __init__(self, size_class: SizeClass, is_declared: bool) -> None:
        """Begin with the limits of `SizeClass.suits`; those of q, k and v follow from the rest.

        Args:
            size_class: the batches' size class.
            is_declared: the bounds are declared.
        """
        room, least = size_class.site.room.bounds, size_class.least
        self.most = {
            "requests": room.max_requests, "busy": INT32_MAX, "q_rows": INT32_MAX,
            "rows": room.max_q_rows, "longest_q": INT32_MAX, "kv_len": room.max_kv_len,
            "blocks": room.max_blocks,
        }  # fmt: skip
        self.least = dict.fromkeys(self.most, 0)
        if not is_declared:
            self.least |= {
                "requests": least.max_requests, "rows": least.max_q_rows,
                "kv_len": least.max_kv_len, "blocks": least.max_blocks,
            }  # fmt: skip

    def keep(self, name: str, least: int, most: int = INT32_MAX) -> None:
        """Narrow the limits of one number."""
        self.least[name] = max(self.least[name], least)
        self.most[name] = min(self.most[name], most)

    def keep_equal(self, sizes: Sizes) -> None:
        """Allow only batches with the same numbers of requests and rows."""
        busy = round(sizes.segment_rows / sizes.busy_rows) if sizes.segment_rows else 0
        self.keep("requests", sizes.num_requests, sizes.num_requests)
        self.keep("rows", sizes.segment_rows, sizes.segment_rows)
        self.keep("busy", busy, busy)


class ReplanGuard:
    """Which batches are planned like a given one, with its choice, into its size class.

    Compiled code checks a batch against it as it would a guard of a compiled graph.

    Attributes:
        size_class: the given batch's size class.
    """

    def __init__(self, rules: Rules, size_class: SizeClass, sizes: Sizes) -> None:
        """Note a plan; the record for compiled code is made when it is first needed.

        Args:
            rules: rules of the plan.
            size_class: see the attribute.
            sizes: sizes of the batch.
        """
        self.size_class = size_class
        self._rules, self._sizes = rules, sizes

    def repeats(self, before: ReplanGuard | None) -> bool:
        """Whether the previous plan was like this one, so that the next plan may be, too."""
        if before is None or before.size_class is not self.size_class:
            return False
        now, was = self._sizes, before._sizes
        is_steady = (now.num_requests, now.segment_rows) == (was.num_requests, was.segment_rows)
        return is_steady or self.size_class.has_roles or self._rules.fixed is not None

    @cached_property
    def address(self) -> int:
        """Address of the record of limits for compiled code; 0 if limits are not sufficient."""
        record = self._record()
        if record is None:
            return 0
        self._bytes = ctypes.create_string_buffer(record, len(record))
        return ctypes.addressof(self._bytes)

    def _record(self) -> bytes | None:
        rules, size_class, sizes = self._rules, self.size_class, self._sizes
        heads, mixes = rules.heads, rules.mixes
        if rules.spec.stamps:  # stamps must be reset for each plan
            return None
        limits = Limits(size_class, rules.options.bounds is not None)
        if rules.fixed is not None:
            if not size_class.has_roles:
                _keep_partition(limits, size_class, sizes, heads.group_size)
            return _packed(limits)
        if mixes is not None and may_be_mixed(sizes, heads.group_size):
            mix = mixes.all[0]  # for others, each mix before would have to be checked, too
            if size_class.choice is not mix.choice or not _is_in_range(size_class, mix, heads):
                return None
            limits.keep("requests", 2)
            limits.keep("longest_q", MANY_ROWS // heads.group_size + 1)
            return _packed(limits, mix, heads.num_kv, rules.free_ctas)
        if rules.pretransforms:
            return None
        octave = sizes.max_kv_len.bit_length()
        limits.keep_equal(sizes)
        limits.keep("kv_len", 1 << octave >> 1, (1 << octave) - 1)
        if mixes is not None and sizes.num_requests > 1:
            limits.keep("longest_q", 0, MANY_ROWS // heads.group_size)
        return _packed(limits)


def _packed(limits: Limits, mix: Mix | None = None, heads: int = 0, ctas: int = 1) -> bytes:
    """The record for compiled code.

    Args:
        limits: limits of the batches.
        mix: the mix that these batches get as long as it pays; None: that is not checked.
        heads: key/value heads.
        ctas: CTAs that may get work.
    """
    prices, ways, sizes = _UNASKED
    if mix is not None:
        cost, margins = mix.cost, SHIPPED
        prices = cost.prefill, cost.decode, cost.decode_in_tall
        ways = margins.spread, margins.longer, min(cost.saturating, ctas), ctas, heads
        sizes = mix.sizes
    fewest, *least = limits.least.values()
    many, *most = limits.most.values()
    return _GUARD.pack(*prices, *ways, *sizes, fewest, many, *least, *most)


def _is_in_range(size_class: SizeClass, mix: Mix, heads: Heads) -> bool:
    """Whether 63 bits hold the sum of picoseconds of all work that there is room for."""
    site, sizes, cost = size_class.site, mix.sizes, mix.cost
    key_tiles = site.room.bounds.max_kv_len // min(sizes.keys, sizes.decode_keys) + 1
    price = max(cost.prefill, cost.decode, cost.decode_in_tall)
    return site.max_tiles * heads.num_kv * key_tiles * price < 2**61


def _keep_partition(limits: Limits, size_class: SizeClass, sizes: Sizes, group_size: int) -> None:
    """Allow batches with the same `Rules.partition` for the one tile."""
    most = (SHARING_TILES * size_class.kernel.tile.rows - 1) // group_size
    if size_class.partition is Partition.LINES and sizes.longest_q <= most:
        limits.keep("longest_q", 0, most)  # then the mean of tiles stays below SHARING_TILES
    else:
        limits.keep_equal(sizes)
