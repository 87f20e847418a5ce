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
    """

    threads: int
    shared_bytes: int
    ctas_per_sm: int
    overlaps: bool = False
