"""Kernels that this process has loaded, each once for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from warploom.codegen.build import Artifact, build, content_key
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.counters import count
from warploom.runtime.devices.graph import refuse_loading

T = TypeVar("T")


class Loaded(Generic[T]):
    """Kernels of one kind, by the digest of all that decides what is built, device and grid."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], T] = {}

    def get(
        self,
        source: KernelSource,
        target: Arch | HostTarget,
        device: torch.device,
        load: Callable[[Artifact], T],
        num_ctas: int = 0,
    ) -> T:
        """The kernel of a source, built and loaded if it is new.

        Args:
            source: its text.
            target: what it is compiled for.
            device: where it runs.
            load: from what was built to the kernel.
            num_ctas: its grid, if that can differ from one call to the next.

        Raises:
            CompileForbidden: it is new and a CUDA graph is being captured, or compiling is
                forbidden and it is not cached.
            CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: it could not be made.
        """
        key = content_key(source, target).digest, str(device), num_ctas
        if key in self._found:
            count("memory_hits")
            return self._found[key]
        refuse_loading(device, source.name)
        found = self._found[key] = load(build(source, target))
        return found
