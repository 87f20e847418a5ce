"""The kernels of a spec on one device, each built and loaded once."""

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
    """A loaded attention kernel.

    Attributes:
        tile: tile configuration.
        pretransform: the kernel that transforms the keys before attention, if there is one.
    """

    tile: TileConfig
    pretransform: loaded.Kernel | None = None


class Kernels(KernelChoice):
    """Kernels of one spec on one device, built on first use."""

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
            device: where to run.
            pretransform: kernel that may transform keys before attention; None: only attention may.
            always: pretransform keys even if few query tiles read them.

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
        """Lower bound of any kernel's grid size in CTAs, known before the kernel is built."""
        return self.num_sms if isinstance(self.target, Arch) else default_num_ctas()

    def get(self, choice: TileChoice) -> Kernel:
        """The kernel of a choice, from this process, from the cache or from the compiler.

        Raises:
            CompileForbidden: the kernel is not loaded and a CUDA graph is being captured, or
                compiling is forbidden and the kernel is not cached.
            CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: the kernel could not be made.
        """
        found = self._kernels.get(choice)
        if found is None:
            on_gpu = isinstance(self.target, Arch)
            grid = 0 if on_gpu else default_num_ctas()  # at present
            where = self.target, self._device
            made = loaded.load(self.kernel(choice), self.source(choice), *where, grid)
            before: loaded.Kernel | None = None
            if choice.pretransformed_keys:
                before = loaded.load(self.pretransform, self.pretransform_source, *where)
            parts = made.source, made.artifact, made.num_ctas, made.bind
            found = self._kernels[choice] = Kernel(*parts, choice.tile, before)
        return found
