"""Templates whose launches may have one tile for prefills and one for decodes (decision 0044)."""

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

_LANES = 128  # most lanes of a head: wider heads leave decodes too few registers
_DRAWN_BYTES = 32  # a CTA's state of its work lists (ClaimState in lists.cuh)


class TwoRoles(CudaTemplate):
    """A template whose CTAs take two roles in turn, in the same shared memory.

    The first warps of a CTA stream decodes.

    Attributes:
        decodes: the template of the role with few rows.
        prefill_ps: picoseconds that an SM of an H200 takes for 128 rows by 128 keys of 128 lanes,
            in both products, with 16-bit elements.
        narrow_ps: the same for 8-bit keys and values, which are widened first.
    """

    takes_roles = True
    decodes: ClassVar[Streamed] = Streamed()
    prefill_ps: ClassVar[int]
    narrow_ps: ClassVar[int]

    @abstractmethod
    def cta_threads(self, spec: AttentionSpec, tile: TileConfig) -> int:
        """Threads of a CTA."""

    def role_obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        """Why a launch cannot have the tile of decodes beside the tile of prefills, or None."""
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
        """The template for decodes if the tile is one of its tiles, else this template."""
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
        """Bytes of a CTA's shared memory, which the roles use in turn."""
        if tile.decode is None:
            return self.memory(spec, tile).bytes
        return self._drawn_at(spec, tile, tile.decode) + _DRAWN_BYTES

    def _drawn_at(self, spec: AttentionSpec, tile: TileConfig, decode: TileConfig) -> int:
        """Offset of the state of work lists, behind the memory of both roles."""
        both = self.memory(spec, tile).bytes, self.decodes.memory(spec, decode).bytes
        return round_up(max(both), _DRAWN_BYTES)
