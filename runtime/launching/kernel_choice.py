"""Which kernels a spec can have on one kind of machine, and their sources: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from warploom.codegen.attention.choice import choose_tile, tiles_weighed
from warploom.codegen.attention.composed_cost import Reading, cheapest_composed_tile, composed_tiles
from warploom.codegen.attention.template import AttentionKernel, Template
from warploom.codegen.attention.templates import CPU, template_of
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.lowering.specialize import for_prepared_keys
from warploom.codegen.prepare import PrepareSpec
from warploom.codegen.source import KernelSource, TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.launching.prepared_keys import prepared_rows
from warploom.scheduler.layout import c_structs

# Mean fused rows per request that stand for all choices of a tile: decode to long prefill.
_SAMPLES = (1, 8, 16, 24, 48, 64, 96, 128, 192, 1024, 2048)
_TALL = 64  # rows of a tile; a model of costs gives no fewer to requests whose keys are prepared


class KernelChoice:
    """Kernels that one spec can have, and which of them a batch gets.

    Attributes:
        target: what they are compiled for.
        prepares: whether keys may be transformed before attention.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: Arch | HostTarget,
        prepare: PrepareSpec | None = None,
        always: bool = False,
        num_sms: int = 1,
    ) -> None:
        """Render nothing yet.

        Args:
            spec: what to compute.
            target: what kernels are compiled for.
            prepare: how keys may be transformed before attention; None: only in attention.
            always: not only where keys meet many query tiles.
            num_sms: of a GPU.
        """
        self._spec = spec
        self._prepare = prepare
        self.prepares = prepare is not None
        self._prepared_rows = prepared_rows(spec)
        self._always = always
        self.target: Arch | HostTarget = target
        self._num_sms = num_sms
        self._sources: dict[TileConfig, KernelSource] = {}

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of a GPU."""
        return self._num_sms

    def spec_of(self, tile: TileConfig) -> AttentionSpec:
        """What the attention kernel of a tile is compiled for."""
        return self._plain if tile.prepared_keys else self._spec

    def choose(
        self,
        mean_fused_rows: float,
        items: int | None = None,
        keys: int | None = None,
        may_prepare: bool = True,
    ) -> TileChoice:
        """The tile for requests with this many query rows x query heads per key/value head.

        Args:
            mean_fused_rows: that number.
            items: requests x key/value heads, if known.
            keys: of a request, if known.
            may_prepare: whether the batch's keys could be transformed before.
        """
        often = may_prepare and mean_fused_rows >= self._prepared_rows
        prepared = self.prepares and (often or self._always)
        return self._choose(prepared, mean_fused_rows, items, keys)

    def _choose(
        self,
        prepared: bool,
        mean_fused_rows: float,
        items: int | None = None,
        keys: int | None = None,
    ) -> TileChoice:
        if not isinstance(self.target, Arch):
            return CPU.choose(self._spec, mean_fused_rows)
        share = None if items is None else items / self.num_sms
        spec = self._plain if prepared else self._spec
        choice = choose_tile(spec, self.target, mean_fused_rows, share, keys)
        return replace(choice, tile=replace(choice.tile, prepared_keys=prepared))

    @cached_property
    def _plain(self) -> AttentionSpec:
        """The spec of kernels whose keys come transformed."""
        return for_prepared_keys(self._spec)

    def candidates(self, fewest_rows: float = 1) -> list[TileConfig]:
        """Every tile that `choose` can give, for this many fused rows or more."""
        if not self.prepares:
            return self._candidates(False, fewest_rows)
        if self._always:
            return self._candidates(True, fewest_rows)
        often = self._candidates(True, max(fewest_rows, self._prepared_rows))
        tall = [tile for tile in often if tile.rows >= _TALL]
        return [*self._candidates(False, fewest_rows), *tall]

    def _candidates(self, prepared: bool, fewest_rows: float) -> list[TileConfig]:
        spec = self._plain if prepared else self._spec
        if isinstance(self.target, Arch) and (weighed := tiles_weighed(spec, self.target)):
            weighed = [replace(tile, prepared_keys=prepared) for tile in weighed]
            return list(dict.fromkeys([self._choose(prepared, fewest_rows).tile, *weighed]))
        samples = [max(rows, fewest_rows) for rows in _SAMPLES]
        chosen = (self._choose(prepared, rows, n).tile for rows in samples for n in (1, None))
        return list(dict.fromkeys(chosen))

    def composed_candidates(self, fewest_rows: float) -> list[TileConfig]:
        """Every tile that a composed plan can have: the model's, or if there is none, by rows."""
        pool = composed_tiles(self._spec, self.target) if isinstance(self.target, Arch) else []
        return pool or self.candidates(fewest_rows)

    def cheapest_composed(
        self, reads_with: Callable[[int], tuple[int, int, int]]
    ) -> TileChoice | None:
        """The tile of a composed plan by the model of costs, or None where there is none.

        Args:
            reads_with: keys that are read, keys that are walked, and tiles, for so many rows.
        """
        if not isinstance(self.target, Arch):
            return None
        return cheapest_composed_tile(
            self._spec,
            self.target,
            lambda rows: Reading(*(x / self.num_sms for x in reads_with(rows))),
        )

    def obstacle(self, tile: TileConfig) -> str | None:
        """Why kernels cannot have a tile, or None."""
        if not isinstance(self.target, Arch):
            return None
        return template_of(tile).obstacle(self.spec_of(tile), tile)

    def kernel(self, tile: TileConfig) -> AttentionKernel:
        """The attention kernel of a tile; raises UnsupportedSpec if there cannot be one."""
        template: Template = template_of(tile) if isinstance(self.target, Arch) else CPU
        return template.kernel(self.spec_of(tile), tile)

    def source(self, tile: TileConfig) -> KernelSource:
        if tile not in self._sources:
            kernel = self.kernel(tile)
            structs = c_structs(self._spec.kv_format.composed, bool(tile.of_roles))
            self._sources[tile] = kernel.render(kernel.of.language, structs)
        return self._sources[tile]

    def sources(self, tile: TileConfig) -> list[KernelSource]:
        """Those of all kernels that plans with a tile launch."""
        return [self.source(tile), *([self.prepare_source] if tile.prepared_keys else ())]

    @property
    def prepare(self) -> PrepareSpec:
        """The kernel that transforms keys before attention."""
        if self._prepare is None:
            raise RuntimeError("keys of this spec are transformed in attention alone")
        return self._prepare

    @cached_property
    def prepare_source(self) -> KernelSource:
        """Its text."""
        return self.prepare.render("cuda", c_structs())
