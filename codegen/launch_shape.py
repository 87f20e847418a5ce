"""What the launch of a CUDA kernel needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchShape:
    """What a launch of a CUDA kernel needs.

    Attributes:
        threads: threads of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        ctas_per_sm: CTAs that an SM holds, by shared memory and the most registers of such tiles.
        overlaps: whether it may begin while the kernel before it ends (decision 0022).
        registers: that a thread must be launched with, since groups of warps exchange them and one
            would wait for ever for what others never had; 0: any number.
    """

    threads: int
    shared_bytes: int
    ctas_per_sm: int
    overlaps: bool = False
    registers: int = 0
