"""The kernels that a spec can use on one kind of machine, and their sources; compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from warploom.codegen.attention.template import AttentionKernel, Template
from warploom.codegen.attention.templates import CPU, template_of
from warploom.codegen.choice.composed_cost import Reading, cheapest_composed_tile, composed_tiles
from warploom.codegen.choice.role_choice import role_choices, role_obstacle
from warploom.codegen.choice.tile_choice import choose_tile, tiles_weighed
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.lowering.specialize import for_pretransformed_keys
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import KernelSource, TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.launching.pretransformed_keys import pretransform_rows
from warploom.scheduler.model.layout import c_structs

# Mean fused rows per request, from decode to long prefill, that sample all choices of a tile.
_SAMPLES = (1, 8, 16, 24, 48, 64, 96, 128, 192, 1024, 2048)
_TALL = 64  # rows; the cost model picks no smaller tile for requests with pretransformed keys


class KernelChoice:
    """The kernels that one spec can use, and the choice between them for a batch.

    Attributes:
        target: what kernels are compiled for.
        pretransforms: whether keys may be transformed before attention.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: Arch | HostTarget,
        pretransform: PretransformSpec | None = None,
        always: bool = False,
        num_sms: int = 1,
    ) -> None:
        """Render nothing yet.

        Args:
            spec: what to compute.
            target: what kernels are compiled for.
            pretransform: kernel that may transform keys before attention; None: only attention may.
            always: pretransform keys even if few query tiles read them.
            num_sms: SMs of a GPU.
        """
        self._spec = spec
        self._pretransform = pretransform
        self.pretransforms = pretransform is not None
        self._pretransform_rows = pretransform_rows(spec)
        self._always = always
        self.target: Arch | HostTarget = target
        self._num_sms = num_sms
        self._sources: dict[TileChoice, KernelSource] = {}

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of a GPU."""
        return self._num_sms

    def spec_of(self, choice: TileChoice) -> AttentionSpec:
        """The spec that the attention kernel of a choice is compiled for."""
        return self._plain if choice.pretransformed_keys else self._spec

    def given(self, tile: TileConfig) -> TileChoice:
        """The choice for a tile that the caller gave: it pretransforms keys only if `always`."""
        return TileChoice(tile, pretransformed_keys=self._always)

    def choose(
        self,
        mean_fused_rows: float,
        items: int | None = None,
        keys: int | None = None,
        may_pretransform: bool = True,
    ) -> TileChoice:
        """The tile for requests with a given mean number of fused rows.

        Args:
            mean_fused_rows: query rows of a request x query heads per key/value head.
            items: requests x key/value heads, if known.
            keys: keys of a request, if known.
            may_pretransform: whether the batch's keys can be transformed before attention.
        """
        often = may_pretransform and mean_fused_rows >= self._pretransform_rows
        pretransformed = self.pretransforms and (often or self._always)
        return self._choose(pretransformed, mean_fused_rows, items, keys)

    def _choose(
        self,
        pretransformed: bool,
        mean_fused_rows: float,
        items: int | None = None,
        keys: int | None = None,
    ) -> TileChoice:
        if not isinstance(self.target, Arch):
            return CPU.choose(self._spec, mean_fused_rows)
        share = None if items is None else items / self.num_sms
        spec = self._plain if pretransformed else self._spec
        choice = choose_tile(spec, self.target, mean_fused_rows, share, keys)
        return replace(choice, pretransformed_keys=pretransformed)

    def of_roles(self, group_size: int) -> tuple[TileChoice, ...]:
        """Tiles with two roles for batches of decodes and prefills; none if these get one tile.

        Args:
            group_size: query heads per key/value head.
        """
        if not isinstance(self.target, Arch) or self._always:
            return ()
        return role_choices(self._spec, self.target, group_size)

    def obstacle_to_roles(self, group_size: int) -> str | None:
        """Why `of_roles` returns no tiles; None if it returns some."""
        assert isinstance(self.target, Arch)  # on a CPU only a given tile has two roles
        if self._always:
            return "keys are transformed before attention"
        return role_obstacle(self._spec, self.target, group_size)

    @cached_property
    def _plain(self) -> AttentionSpec:
        """The spec of kernels that read pretransformed keys."""
        return for_pretransformed_keys(self._spec)

    def candidates(self, fewest_rows: float = 1) -> list[TileChoice]:
        """Every choice that `choose` can make for `fewest_rows` or more fused rows."""
        if not self.pretransforms:
            return self._candidates(False, fewest_rows)
        if self._always:
            return self._candidates(True, fewest_rows)
        often = self._candidates(True, max(fewest_rows, self._pretransform_rows))
        tall = [choice for choice in often if choice.tile.rows >= _TALL]
        return [*self._candidates(False, fewest_rows), *tall]

    def _candidates(self, pretransformed: bool, fewest_rows: float) -> list[TileChoice]:
        spec = self._plain if pretransformed else self._spec
        if isinstance(self.target, Arch) and (tiles := tiles_weighed(spec, self.target)):
            weighed = [TileChoice(tile, pretransformed_keys=pretransformed) for tile in tiles]
            return list(dict.fromkeys([self._choose(pretransformed, fewest_rows), *weighed]))
        samples = [max(rows, fewest_rows) for rows in _SAMPLES]
        chosen = (self._choose(pretransformed, rows, n) for rows in samples for n in (1, None))
        return list(dict.fromkeys(chosen))

    def composed_candidates(self, fewest_rows: float) -> list[TileChoice]:
        """Every choice for a composed plan: by the cost model, or without one by rows."""
        return [TileChoice(tile) for tile in self._composed] or self.candidates(fewest_rows)

    @cached_property
    def _composed(self) -> list[TileConfig]:
        """Tiles of the shared-prefix cost model; finding them takes as long as a plan."""
        return composed_tiles(self._spec, self.target) if isinstance(self.target, Arch) else []

    def cheapest_composed(
        self, reads_with: Callable[[int], tuple[int, int, int]]
    ) -> TileChoice | None:
        """The cheapest tile of a composed plan by the cost model; None without a model.

        Args:
            reads_with: for a tile's rows, the keys that are read, the keys that are walked, and the
                number of tiles.
        """
        if not isinstance(self.target, Arch) or not self._composed:
            return None
        return cheapest_composed_tile(
            self._spec,
            self.target,
            self._composed,
            lambda rows: Reading(*(x / self.num_sms for x in reads_with(rows))),
        )

    def kernel(self, choice: TileChoice) -> AttentionKernel:
        """The attention kernel of a choice; raises UnsupportedSpec if the choice has none."""
        template: Template = template_of(choice.tile) if isinstance(self.target, Arch) else CPU
        return template.kernel(self.spec_of(choice), choice.tile)

    def source(self, choice: TileChoice) -> KernelSource:
        """The source of that kernel; raises UnsupportedSpec if the target cannot run it."""
        if choice not in self._sources:
            kernel = self.kernel(choice)
            if isinstance(self.target, Arch):
                kernel.launch(self.target)
            structs = c_structs(self._spec.kv_format.composed, bool(choice.tile.of_roles))
            self._sources[choice] = kernel.render(kernel.of.language, structs)
        return self._sources[choice]

    def sources(self, choice: TileChoice) -> list[KernelSource]:
        """The sources of all kernels that plans with this choice launch."""
        before = [self.pretransform_source] if choice.pretransformed_keys else []
        return [self.source(choice), *before]

    @property
    def pretransform(self) -> PretransformSpec:
        """The kernel that transforms keys before attention."""
        if self._pretransform is None:
            raise RuntimeError("keys of this spec are transformed in attention alone")
        return self._pretransform

    @cached_property
    def pretransform_source(self) -> KernelSource:
        """The source of the kernel that transforms keys before attention."""
        return self.pretransform.render("cuda", c_structs())
