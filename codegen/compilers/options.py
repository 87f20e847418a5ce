"""Every compiler option of a CUDA kernel, named; nobody else joins flags."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.compilers.arch import Arch


@dataclass(frozen=True)
class CudaOptions:
    """Options that change the cubin, and so belong to the cache key.

    `--use_fast_math` is absent on purpose: it would also change division and denormals of user
    functors. The headers choose fast intrinsics one by one instead.

    Attributes:
        std: C++ standard; CuTe needs 17.
        line_info: maps instructions to source lines, for profilers and compute-sanitizer.
        racecheck: the kernels of compute-sanitizer's racecheck, in which every thread arrives at
            barriers for itself.
        cache_hints: whether copies may tell L2 that what they read is read once.
        max_registers: limit of registers per thread, or None for the compiler's choice.
    """

    std: str = "c++17"
    line_info: bool = False
    racecheck: bool = False
    cache_hints: bool = True
    max_registers: int | None = None

    def flags(self, arch: Arch) -> tuple[str, ...]:
        """NVRTC flags, always in the same order, as precompiled headers want it."""
        flags = [
            f"--std={self.std}",
            "--device-as-default-execution-space",
            arch.flag,
            "--ptxas-options=-v",  # reports spills in the log
        ]
        if self.line_info:
            flags.append("--generate-line-info")
        if self.racecheck:
            flags.append("-DWARPLOOM_RACECHECK")
        if not self.cache_hints:
            flags.append("-DWARPLOOM_NO_CACHE_HINTS")
        if self.max_registers is not None:
            flags.append(f"--maxrregcount={self.max_registers}")
        return tuple(flags)
