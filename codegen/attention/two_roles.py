"""Templates whose launches may hold a tile for prefills and one for decodes (decision 0044)."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from warploom.codegen.attention.streamed import Streamed
from warploom.codegen.attention.template import CudaTemplate, Template
from warploom.codegen.render import Config
from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.errors import UnsupportedSpec

_LANES = 128  # of heads, at most: wider ones leave decodes too few registers
_DRAWN_BYTES = 32  # what a CTA keeps of its lists (Drawn in lists.cuh)


class TwoRoles(CudaTemplate):
    """Decodes stream by the first warps of a CTA, in the memory that prefills then have.

    Attributes:
        decodes: the template of the role with few rows.
        prefill_ps: picoseconds that an SM of an H200 takes for 128 rows by 128 keys of 128 lanes,
            in both products, of 16-bit elements.
        narrow_ps: the same where keys and values have 8 bits, and are widened for it.
    """

    takes_roles = True
    decodes: ClassVar[Streamed] = Streamed()
    prefill_ps: ClassVar[int]
    narrow_ps: ClassVar[int]

    @abstractmethod
    def cta_threads(self, spec: AttentionSpec, tile: TileConfig) -> int:
        """Threads of a CTA."""

    def role_obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        """Why a launch cannot have the tile of decodes beside the other; None without one."""
        decode = tile.decode
        if decode is None:
            return None
        if max(spec.head_dim_qk, spec.head_dim_v) > _LANES:
            return f"heads of more than {_LANES} lanes leave decodes too few registers"
        if not self.decodes.has(decode):
            return f"decodes stream through portable tiles of 16 or 8 rows, not {decode.label}"
        threads = self.cta_threads(spec, tile)
        if self.decodes.threads(decode) > threads:
            return f"its CTAs have {threads} threads, fewer than {decode.label} takes"
        return self.decodes.obstacle(spec, decode)

    def check(self, spec: AttentionSpec, tile: TileConfig) -> None:
        if why := self.role_obstacle(spec, tile):
            remedy = "Give another `decode`, or a tile without one."
            raise UnsupportedSpec(what=self.called(tile), reason=why, remedy=remedy)
        super().check(spec, tile)

    def of_role(self, tile: TileConfig) -> Template:
        """Tiles of few rows are streamed."""
        return self.decodes if self.decodes.has(tile) else self

    def role_context(self, spec: AttentionSpec, tile: TileConfig) -> Config:
        if tile.decode is None:
            return {}
        return {
            "drawn_at": self._drawn_at(spec, tile, tile.decode),
            "drawn_bytes": _DRAWN_BYTES,
            "cta_threads": self.cta_threads(spec, tile),
            "decode_threads": self.decodes.threads(tile.decode),
        }

    def shared_bytes(self, spec: AttentionSpec, tile: TileConfig) -> int:
        """Shared memory of a CTA, in which roles take turns."""
        if tile.decode is None:
            return self.memory(spec, tile).bytes
        return self._drawn_at(spec, tile, tile.decode) + _DRAWN_BYTES

    def _drawn_at(self, spec: AttentionSpec, tile: TileConfig, decode: TileConfig) -> int:
        """Where behind both roles' memory the numbers lie."""
        both = self.memory(spec, tile).bytes, self.decodes.memory(spec, decode).bytes
        return round_up(max(both), _DRAWN_BYTES)
