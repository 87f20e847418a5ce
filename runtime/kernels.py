"""A spec's kernels on one device: tile choice, rendering, building and loading, each done once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from warploom.codegen.arch import Arch
from warploom.codegen.build import Artifact
from warploom.codegen.hostcc import HostTarget, host_target
from warploom.codegen.render import render_cpu, render_cuda
from warploom.codegen.source import KernelSource, TileConfig
from warploom.codegen.tile_cost_composed import Reading, cheapest_composed_tile, composed_tiles
from warploom.codegen.tiles import choose_tile, cuda_launch, tiles_weighed
from warploom.codegen.tiles_cpu import cpu_tile
from warploom.dsl.spec import AttentionSpec
from warploom.runtime.cpu import CpuKernel, default_num_ctas
from warploom.runtime.cuda import CudaKernel
from warploom.runtime.device import cuda_facts
from warploom.runtime.loaded import Loaded
from warploom.runtime.params import ParamBlock
from warploom.scheduler.layout import c_structs

# Mean fused rows per request that stand for all choices of a tile: decode to long prefill.
_SAMPLES = (1, 8, 16, 24, 48, 64, 96, 128, 192, 1024, 2048)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        tile: its sizes, with the reason for them.
        source: rendered text.
        artifact: what was built of it.
        num_ctas: size of its grid.
        bind: a function that runs it on all CTAs with these parameters, given a stream handle.
    """

    tile: TileConfig
    source: KernelSource
    artifact: Artifact
    num_ctas: int
    bind: Callable[[ParamBlock], Callable[[int], None]]


_loaded: Loaded[Kernel] = Loaded()


class Kernels:
    """Kernels of one spec on one device, made when first asked for.

    Attributes:
        target: what they are compiled for.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        """Find the compiler's target.

        Raises:
            NoHostCompiler: the device is the CPU and there is no compiler.
        """
        self._spec = spec
        self._device = device
        self.target: Arch | HostTarget = (
            cuda_facts(device.index).arch if device.type == "cuda" else host_target()
        )
        self._sources: dict[TileConfig, KernelSource] = {}
        self._kernels: dict[TileConfig, Kernel] = {}

    def choose(
        self, mean_fused_rows: float, items: int | None = None, keys: int | None = None
    ) -> TileConfig:
        """The tile for requests with this many query rows x query heads per key/value head.

        Args:
            mean_fused_rows: that number.
            items: requests x key/value heads, if known.
            keys: of a request, if known.
        """
        if isinstance(self.target, Arch):
            sms = cuda_facts(self._device.index).num_sms
            share = None if items is None else items / sms
            return choose_tile(self._spec, self.target, mean_fused_rows, share, keys)
        return cpu_tile(self._spec, mean_fused_rows)

    def candidates(self, fewest_rows: float = 1) -> list[TileConfig]:
        """Every tile that `choose` can give, for this many fused rows or more."""
        if isinstance(self.target, Arch) and (weighed := tiles_weighed(self._spec, self.target)):
            return list(dict.fromkeys([self.choose(fewest_rows), *weighed]))
        samples = [max(rows, fewest_rows) for rows in _SAMPLES]
        return list(dict.fromkeys(self.choose(rows, n) for rows in samples for n in (1, None)))

    def composed_candidates(self, fewest_rows: float) -> list[TileConfig]:
        """Every tile that a composed plan can have: the model's, or if there is none, by rows."""
        pool = composed_tiles(self._spec, self.target) if isinstance(self.target, Arch) else []
        return pool or self.candidates(fewest_rows)

    def cheapest_composed(
        self, reads_with: Callable[[int], tuple[int, int, int]]
    ) -> TileConfig | None:
        """The tile of a composed plan by the model of costs, or None where there is none.

        Args:
            reads_with: keys that are read, keys that are walked, and tiles, for so many rows.
        """
        if not isinstance(self.target, Arch):
            return None
        sms = cuda_facts(self._device.index).num_sms
        return cheapest_composed_tile(
            self._spec, self.target, lambda rows: Reading(*(x / sms for x in reads_with(rows)))
        )

    def source(self, tile: TileConfig) -> KernelSource:
        if tile not in self._sources:
            render = render_cuda if isinstance(self.target, Arch) else render_cpu
            self._sources[tile] = render(self._spec, tile, c_structs(self._spec.kv_format.composed))
        return self._sources[tile]

    def get(self, tile: TileConfig) -> Kernel:
        """The kernel for a tile, from this process, from the cache or from the compiler.

        Raises:
            CompileForbidden: it is not loaded and a CUDA graph is being captured, or compiling is
                forbidden and it is not cached.
            CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: it could not be made.
        """
        found = self._kernels.get(tile)
        if found is None:
            found = self._kernels[tile] = self._find(tile)
        return found

    def _find(self, tile: TileConfig) -> Kernel:
        source = self.source(tile)
        grid = 0 if isinstance(self.target, Arch) else default_num_ctas()  # of now
        return _loaded.get(
            source,
            self.target,
            self._device,
            lambda built: self._load(tile, source, built, grid),
            grid,
        )

    def _load(
        self, tile: TileConfig, source: KernelSource, artifact: Artifact, grid: int
    ) -> Kernel:
        if not isinstance(self.target, Arch):
            host = CpuKernel(source.name, artifact)
            return Kernel(
                tile, source, artifact, grid, lambda params: lambda _: host.launch(params, grid)
            )
        shape = cuda_launch(self._spec, tile, self.target)
        cuda = CudaKernel(source.name, artifact, shape, self._device.index)
        return Kernel(tile, source, artifact, cuda.num_ctas, cuda.bind)
