"""The one way to a kernel of any kind: built, loaded once for a device, and bound to parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from warploom.codegen.build import Artifact, build, content_key
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.kinds import KernelSpec
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.source import KernelSource
from warploom.counters import count
from warploom.runtime.devices.cpu import CpuKernel
from warploom.runtime.devices.cuda import CudaKernel
from warploom.runtime.devices.graph import refuse_loading
from warploom.runtime.devices.params import Block

Bind: TypeAlias = Callable[[Block], Callable[[int], None]]  # from parameters to a launch


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        source: rendered text.
        artifact: what was built of it.
        num_ctas: size of its grid.
        bind: a function that runs it on all CTAs with these parameters, given a stream handle.
    """

    source: KernelSource
    artifact: Artifact
    num_ctas: int
    bind: Bind


# By the digest of all that decides what is built, device, grid, threads and launch shape.
_loaded: dict[tuple[str, str, int, int | None, LaunchShape | None], Kernel] = {}


def load(
    spec: KernelSpec,
    source: KernelSource,
    target: Arch | HostTarget,
    device: torch.device,
    grid: int = 0,
    threads: int | None = None,
) -> Kernel:
    """A kernel, built and loaded if it is new.

    Args:
        spec: what it is compiled for.
        source: what that renders for the target.
        target: what it is compiled for.
        device: where it runs.
        grid: its CTAs; 0 on a GPU: what the device holds at once.
        threads: of a run on the CPU; None: the settings decide at each run.

    Raises:
        CompileForbidden: it is new and a CUDA graph is being captured, or compiling is forbidden
            and it is not cached.
        CompileError, NoHostCompiler, NoCudaCompiler, LaunchError: it could not be made.
    """
    shape = spec.launch(target) if isinstance(target, Arch) else None
    key = content_key(source, target).digest, str(device), grid, threads, shape
    if key in _loaded:
        count("memory_hits")
        return _loaded[key]
    refuse_loading(device, source.name)
    artifact = build(source, target)
    if shape is None:
        host = CpuKernel(source.name, artifact)
        found = Kernel(
            source, artifact, grid, lambda params: lambda _: host.launch(params, grid, threads)
        )
    else:
        cuda = CudaKernel(source.name, artifact, shape, device.index)
        cuda.num_ctas = grid or cuda.num_ctas
        found = Kernel(source, artifact, cuda.num_ctas, cuda.bind)
    _loaded[key] = found
    return found
