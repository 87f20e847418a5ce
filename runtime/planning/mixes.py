"""Which batches get two roles by themselves: those of decodes and prefills where that pays."""

from __future__ import annotations

from warploom.codegen.attention.role_choice import MANY_ROWS
from warploom.codegen.attention.role_cost import pays, role_cost
from warploom.codegen.source import TileChoice
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.formats.batch import Batch, RoleSizes, Sizes
from warploom.runtime.planning.visibility import Heads


class Mixes:
    """Mixed batches of one wrapper, whose others get one tile.

    Attributes:
        choice: the tiles of mixed batches.
        sizes: of these, by which batches are counted.
    """

    def __init__(self, spec: AttentionSpec, heads: Heads, choice: TileChoice) -> None:
        tile = choice.tile
        assert tile.decode is not None  # it has two roles
        self.choice = choice
        self.sizes = RoleSizes(tile.decode.rows, tile.rows, tile.keys, tile.decode.keys)
        self._heads = heads
        self._cost = role_cost(spec, tile)

    def may_be(self, sizes: Sizes) -> bool:
        """Whether a batch of these sizes can have both, and is to be counted.

        Not where requests have several segments (block rows), which share keys.
        """
        return (
            sizes.longest_q * self._heads.group_size > MANY_ROWS
            and sizes.num_segments > 1
            and sizes.num_segments == sizes.num_requests
        )

    def pay(self, batch: Batch, ctas: int) -> bool:
        """Whether two roles are faster on so many CTAs."""
        if not self.may_be(batch.sizes):
            return False
        prefills, decodes = batch.role_tiles(self.sizes, self._heads.group_size)
        heads = self._heads.num_kv
        return pays(self._cost, prefills * heads, decodes * heads, ctas)
