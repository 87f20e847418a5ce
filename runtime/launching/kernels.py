"""A spec's kernels on one device: building and loading, each done once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.runtime.devices import loaded
from warploom.runtime.devices.cpu import default_num_ctas
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.launching.kernel_choice import KernelChoice


@dataclass(frozen=True)
class Kernel(loaded.Kernel):
    """A loaded kernel of attention.

    Attributes:
        tile: its sizes.
        pretransform: the kernel that transforms its keys before, if there is one.
    """

    tile: TileConfig
    pretransform: loaded.Kernel | None = None


class Kernels(KernelChoice):
    """Kernels of one spec on one device, made when first asked for."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        pretransform: PretransformSpec | None = None,
        always: bool = False,
    ) -> None:
        """Find the compiler's target.

        Args:
            spec: what to compute.
            device: where.
            pretransform: how keys may be transformed before attention; None: only in attention.
            always: not only where keys meet many query tiles.

        Raises:
            NoHostCompiler: the device is the CPU and there is no compiler.
        """
        on_gpu = device.type == "cuda"
        target = cuda_facts(device.index).arch if on_gpu else host_target()
        super().__init__(spec, target, pretransform, always)
        self._device = device
        self._kernels: dict[TileChoice, Kernel] = {}

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of the device."""
        return cuda_facts(self._device.index).num_sms

    @property
    def least_ctas(self) -> int:
        """What the grid of any kernel has at least, known before it is built."""
        return self.num_sms if isinstance(self.target, Arch) else default_num_ctas()

    def get(self, choice: TileChoice) -> Kernel:
        """The kernel of a choice, from this process, from the cache or from the compiler.

        Raises:
            CompileForbidden: it is not loaded and a CUDA graph is being captured, or compiling is
                forbidden and it is not cached.
            CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: it could not be made.
        """
        found = self._kernels.get(choice)
        if found is None:
            on_gpu = isinstance(self.target, Arch)
            grid = 0 if on_gpu else default_num_ctas()  # of now
            where = self.target, self._device
            made = loaded.load(self.kernel(choice), self.source(choice), *where, grid)
            before: loaded.Kernel | None = None
            if choice.pretransformed_keys:
                before = loaded.load(self.pretransform, self.pretransform_source, *where)
            parts = made.source, made.artifact, made.num_ctas, made.bind
            found = self._kernels[choice] = Kernel(*parts, choice.tile, before)
        return found
