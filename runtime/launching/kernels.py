"""A spec's kernels on one device: building and loading, each done once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from warploom.codegen.attention.templates import cuda_launch
from warploom.codegen.build import Artifact
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.prepare import PrepareSpec, prepare_launch
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.devices.cpu import CpuKernel, default_num_ctas
from warploom.runtime.devices.cuda import CudaKernel
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.loaded import Loaded
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.launching.prepared_keys import Bind


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        tile: its sizes, with the reason for them.
        source: rendered text.
        artifact: what was built of it.
        num_ctas: size of its grid.
        bind: a function that runs it on all CTAs with these parameters, given a stream handle.
        prepare: the same of the kernel that transforms its keys before, if there is one.
    """

    tile: TileConfig
    source: KernelSource
    artifact: Artifact
    num_ctas: int
    bind: Callable[[ParamBlock], Callable[[int], None]]
    prepare: Bind | None = None


_loaded: Loaded[Kernel] = Loaded()
_preparing: Loaded[Bind] = Loaded()


class Kernels(KernelChoice):
    """Kernels of one spec on one device, made when first asked for."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        prepare: PrepareSpec | None = None,
        always: bool = False,
    ) -> None:
        """Find the compiler's target.

        Args:
            spec: what to compute.
            device: where.
            prepare: how keys may be transformed before attention; None: only in attention.
            always: not only where keys meet many query tiles.

        Raises:
            NoHostCompiler: the device is the CPU and there is no compiler.
        """
        on_gpu = device.type == "cuda"
        target = cuda_facts(device.index).arch if on_gpu else host_target()
        super().__init__(spec, target, prepare, always)
        self._device = device
        self._kernels: dict[TileConfig, Kernel] = {}

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of the device."""
        return cuda_facts(self._device.index).num_sms

    @property
    def least_ctas(self) -> int:
        """What the grid of any kernel has at least, known before it is built."""
        return self.num_sms if isinstance(self.target, Arch) else default_num_ctas()

    def get(self, tile: TileConfig) -> Kernel:
        """The kernel for a tile, from this process, from the cache or from the compiler.

        Raises:
            CompileForbidden: it is not loaded and a CUDA graph is being captured, or compiling is
                forbidden and it is not cached.
            CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: it could not be made.
        """
        found = self._kernels.get(tile)
        if found is None:
            found = self._find(tile)
            if tile.prepared_keys:  # attention of other key transforms may be the same kernel
                found = replace(found, prepare=self._find_prepare())
            self._kernels[tile] = found
        return found

    def _find_prepare(self) -> Bind:
        source, index = self.prepare_source, self._device.index

        def load(artifact: Artifact) -> Bind:
            return CudaKernel(source.name, artifact, prepare_launch(), index).bind

        return _preparing.get(source, self.target, self._device, load)

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
        shape = cuda_launch(self.spec_of(tile), tile, self.target)
        cuda = CudaKernel(source.name, artifact, shape, self._device.index)
        return Kernel(tile, source, artifact, cuda.num_ctas, cuda.bind)
