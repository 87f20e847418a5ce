"""Which tiles the plans of a wrapper can have, whatever batches come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.codegen.attention.portable import STREAMED_ROWS
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.errors import ArgumentError
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.planning.visibility import Heads
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.layout import ROW_CODE

INVARIANT_ROWS = 64.0  # fused rows for which an invariant wrapper without bounds takes its tile
FEWEST_ROWS = STREAMED_ROWS + 1.0  # fused rows that a composed plan's tile is chosen for on a GPU


@dataclass(frozen=True)
class Options:
    """Choices of a wrapper that hold for all its plans.

    Attributes:
        bounds: the largest batch, if declared.
        fixed_tile: the tile must not depend on the batch.
        batch_invariant: neither may the split.
        sm_limit: CTAs that may get work, or None for all.
        tile: the caller's choice of a tile.
    """

    bounds: Bounds | None
    fixed_tile: bool
    batch_invariant: bool
    sm_limit: int | None
    tile: TileConfig | None


class PlanTiles:
    """Tiles of one wrapper's plans."""

    def __init__(self, kernels: KernelChoice, heads: Heads, options: Options) -> None:
        """Choose nothing yet.

        Args:
            kernels: to choose from.
            heads: head counts.
            options: of the wrapper.
        """
        self._kernels, self._heads, self._options = kernels, heads, options

    def all(self) -> list[TileConfig]:
        """Every tile that a plan can have."""
        fixed = self.fixed()
        return [fixed.tile] if fixed else self._candidates()

    def fixed(self) -> TileChoice | None:
        """The tile of all plans, or None if each batch chooses."""
        options, bounds = self._options, self._options.bounds
        if options.tile is not None:
            return TileChoice(options.tile)
        if not (options.fixed_tile or options.batch_invariant):
            return None
        rows, items, keys = INVARIANT_ROWS, None, None
        if bounds is not None:
            mean = bounds.max_q_rows / max(1, bounds.segments)
            rows = max(1.0, mean) * self._heads.group_size  # who has rows has one at least
            items = bounds.segments * self._heads.num_kv
            keys = bounds.max_kv_len
        return _as_fixed(self._kernels.choose(rows, items, keys))

    def for_rows(self, rows: float) -> TileChoice:
        """The tile for requests with this many fused rows, if nothing else is known."""
        return self._kernels.choose(rows)

    def _candidates(self) -> list[TileConfig]:
        return self._kernels.candidates(self._heads.group_size)


class ComposedTiles(PlanTiles):
    """Tiles of plans for batches whose requests share pages."""

    def fixed(self) -> TileChoice | None:
        """The tile of all plans, or None if each batch chooses.

        Raises:
            ArgumentError: bits that do not depend on neighbours were asked for, a tile of more rows
                than have a code, or one that kernels cannot have.
        """
        options = self._options
        if options.batch_invariant:
            reason = "a composed plan joins states where other requests share a prefix"
            raise ArgumentError(name="batch_invariant", reason=reason)
        obstacle = options.tile and self._kernels.obstacle(options.tile)
        if obstacle:
            raise ArgumentError(name="tile", reason=f"does not suit the kernels: {obstacle}")
        if options.tile is not None and options.tile.rows > ROW_CODE:
            reason = f"has {options.tile.rows} rows; composed plans take {ROW_CODE} at most"
            raise ArgumentError(name="tile", reason=reason)
        if options.tile is not None:
            return TileChoice(options.tile)
        if not options.fixed_tile or options.bounds is None:
            return None
        rows = options.bounds.max_q_rows * self._heads.group_size
        return _as_fixed(self.for_rows(rows / max(1, options.bounds.segments)))

    def for_rows(self, rows: float) -> TileChoice:
        """The tile for keys that this many fused rows meet on average."""
        return self._kernels.choose(max(rows, self._fewest_rows))

    def _candidates(self) -> list[TileConfig]:
        return self._kernels.composed_candidates(self._fewest_rows)

    @property
    def _fewest_rows(self) -> float:
        """On a GPU, where rows alone decide, tiles of 64 rows and more: those of 16 read long
        prefixes of many rows again and again."""
        return FEWEST_ROWS if self._on_gpu else 1.0

    @property
    def _on_gpu(self) -> bool:
        return isinstance(self._kernels.target, Arch)


def tiles_of(kv_format: KVFormat) -> type[PlanTiles]:
    """The class that knows the tiles of a format's plans."""
    return ComposedTiles if kv_format.composed else PlanTiles


def _as_fixed(choice: TileChoice) -> TileChoice:
    return replace(choice, reason=f"fixed for all batches: {choice.reason}")
