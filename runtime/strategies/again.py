"""Plans of batches like the one before, in as few calls as can be.

A server plans one batch after another that differ in lengths and page numbers alone: the same
planner writes them for the same kernel into the same layout. What led there is kept as numbers
between which a batch must lie, so that compiled code can tell (`again.hpp`), and plan at once. All
others, and all that are wrong, go the long way (`planner.Planner`), which would have made the same
plan of those that do not.
"""

from __future__ import annotations

import ctypes
import struct

from warploom.codegen.choice.role_choice import MANY_ROWS
from warploom.codegen.choice.role_cost import SHIPPED
from warploom.runtime.formats.batch import Sizes
from warploom.runtime.planning.mixes import Mix, may_be_mixed
from warploom.runtime.planning.rules import SHARING_TILES, Rules
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.size_classes import SizeClass
from warploom.scheduler.model.bounds import INT32_MAX

_ALIKE = struct.Struct("=4q25i4x")  # warploom::Alike
_UNASKED = (0,) * 4, (1, 1, 1, 1, 0), (0,) * 4  # whether two roles pay


class Limits:
    """Between what the numbers of batches lie that are planned alike.

    Numbers are those of `warploom::Measure` but for rows of q and what k and v must have, which
    follow from the rest, and requests.

    Attributes:
        least, most: by name.
    """

    def __init__(self, size_class: SizeClass, is_declared: bool) -> None:
        """Begin with what `SizeClass.suits` asks.

        Args:
            size_class: of the batches.
            is_declared: its bounds are.
        """
        room, least = size_class.site.room.bounds, size_class.least
        self.most = {
            "requests": room.max_requests, "busy": INT32_MAX, "rows": room.max_q_rows,
            "longest_q": INT32_MAX, "kv_len": room.max_kv_len, "blocks": room.max_blocks,
        }  # fmt: skip
        self.least = dict.fromkeys(self.most, 0)
        if not is_declared:
            self.least |= {
                "requests": least.max_requests, "rows": least.max_q_rows,
                "kv_len": least.max_kv_len, "blocks": least.max_blocks,
            }  # fmt: skip

    def keep(self, name: str, least: int, most: int = INT32_MAX) -> None:
        """Allow no others of a number."""
        self.least[name] = max(self.least[name], least)
        self.most[name] = min(self.most[name], most)

    def keep_equal(self, sizes: Sizes) -> None:
        """Allow as many requests and rows alone."""
        busy = round(sizes.segment_rows / sizes.busy_rows) if sizes.segment_rows else 0
        self.keep("requests", sizes.num_requests, sizes.num_requests)
        self.keep("rows", sizes.segment_rows, sizes.segment_rows)
        self.keep("busy", busy, busy)


class Again:
    """Which batches are planned as the last one was.

    Attributes:
        size_class: of all of them.
        address: of the record that tells compiled code.
    """

    def __init__(
        self, size_class: SizeClass, limits: Limits, mix: Mix | None = None,
        heads: int = 0, ctas: int = 1,
    ) -> None:  # fmt: skip
        """Write the record.

        Args:
            size_class: the attribute.
            limits: between which the batches lie.
            mix: where these get it as long as it pays.
            heads: of keys and values.
            ctas: that may get work.
        """
        self.size_class = size_class
        prices, ways, sizes = _UNASKED
        if mix is not None:
            cost, margins = mix.cost, SHIPPED
            prices = cost.prefill, cost.decode, cost.decode_in_tall, margins.opening
            ways = margins.spread, margins.longer, min(cost.saturating, ctas), ctas, heads
            sizes = mix.sizes
        (fewest, *least), (most, *largest) = (
            (x["requests"], x["busy"], any_number, x["rows"], x["longest_q"], x["kv_len"],
             x["blocks"], any_number)
            for x, any_number in ((limits.least, 0), (limits.most, INT32_MAX))
        )  # fmt: skip
        record = _ALIKE.pack(*prices, *ways, *sizes, fewest, most, *least, *largest)
        self._bytes = ctypes.create_string_buffer(record, len(record))
        self.address = ctypes.addressof(self._bytes)

    @classmethod
    def of(cls, rules: Rules, size_class: SizeClass, sizes: Sizes) -> Again | None:
        """Those that get the choice and the size class of a batch of these sizes, too.

        None where it takes more than numbers to tell.
        """
        tile, mixes, group_size = size_class.kernel.tile, rules.mixes, rules.heads.group_size
        if rules.spec.stamps:  # which are to be forgotten for each plan
            return None
        limits = Limits(size_class, rules.options.bounds is not None)
        if rules.fixed is not None:
            if tile.decode is None:
                _keep_partition(limits, size_class, sizes, group_size)
            return cls(size_class, limits)
        if mixes is not None and may_be_mixed(sizes, group_size):
            mix = mixes.all[0]  # each before another that pays would have to be asked
            if size_class.choice is not mix.choice or not _is_counted(size_class, mix, rules.heads):
                return None
            limits.keep("requests", 2)
            limits.keep("longest_q", MANY_ROWS // group_size + 1)
            return cls(size_class, limits, mix, rules.heads.num_kv, rules.free_ctas)
        if rules.pretransforms:
            return None
        octave = sizes.max_kv_len.bit_length()
        limits.keep_equal(sizes)
        limits.keep("kv_len", 1 << octave >> 1, (1 << octave) - 1)
        if mixes is not None and sizes.num_requests > 1:
            limits.keep("longest_q", 0, MANY_ROWS // group_size)
        return cls(size_class, limits)


def _is_counted(size_class: SizeClass, mix: Mix, heads: Heads) -> bool:
    """Whether picoseconds of all work that there is room for can be added up in 63 bits."""
    site, sizes, cost = size_class.site, mix.sizes, mix.cost
    key_tiles = site.room.bounds.max_kv_len // min(sizes.keys, sizes.decode_keys) + 1
    price = max(cost.prefill, cost.decode, cost.decode_in_tall)
    return site.max_tiles * heads.num_kv * key_tiles * price < 2**61


def _keep_partition(limits: Limits, size_class: SizeClass, sizes: Sizes, group_size: int) -> None:
    """Allow what one tile for all batches assigns as the last: `Rules.uses_stream_k`."""
    most = (SHARING_TILES * size_class.kernel.tile.rows - 1) // group_size
    if size_class.lists is None and sizes.longest_q <= most:
        limits.keep("longest_q", 0, most)  # no batch has more tiles on average
    else:
        limits.keep_equal(sizes)
