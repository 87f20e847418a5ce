"""Accelerators as the model of PRESERVE sees them: a few rates and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.prefetch_errors import NoArea, NoSuchAccelerator

MB = 1e6
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Accelerator:
    """One device of a cluster; bytes, seconds, and operations of the type that weights have.

    Attributes:
        name: of it.
        throughput: operations a second.
        memory_bandwidth: of the device's memory (HBM).
        l2_bandwidth: from L2 to the cores.
        l2_bytes: size of L2.
        usable: share of L2 that a prefetch can count on.
        link_bandwidth: of the links of a ring, in one direction.
        link_latency: what a collective takes besides its bytes.
        core_area, l2_area: mm2 of all cores, and of each byte of L2, where the cost counts. Those
            of the paper's chip are known alone.
        weight_bytes: of a number in weights, keys and activations.
    """

    name: str
    throughput: float
    memory_bandwidth: float
    l2_bandwidth: float
    l2_bytes: float
    link_bandwidth: float
    link_latency: float
    usable: float = 1.0
    core_area: float = 0.0
    l2_area: float = 0.0
    weight_bytes: int = 2

    @property
    def budget(self) -> float:
        """Bytes that may be on their way to L2 at any time."""
        return self.usable * self.l2_bytes

    @property
    def area(self) -> float:
        """mm2 of the cores and of L2; raises NoArea where they are not known."""
        if self.core_area <= 0:
            raise NoArea(name=self.name)
        return self.core_area + self.l2_area * self.l2_bytes


# PRESERVE, table 2: int8; the cores that 800 TOP/s take at 1.84 TOP/s and 1.34 mm2 each.
PAPER = Accelerator(
    "paper", 800e12, 1.84e12, 12e12, 104 * MB, 200 * _GBIT, 25e-6,
    core_area=800 / 1.84 * 1.34, l2_area=0.36 / MB, weight_bytes=1,
)  # fmt: skip

# Throughput (bf16, dense), memory and NVLink (one direction of a GPU's) are those of NVIDIA's data
# sheets for the SXM modules and HGX B200; L2 is 50 MB by the H100 white paper, 60 MB as H200's
# driver tells it, and 126 MB by the Blackwell tuning guide. NVIDIA publishes no bandwidth of L2 and
# no latency of a collective: these are assumptions, to be replaced by what one measures
# (`dataclasses.replace`). So is the usable half: Hopper's L2 is two, and what both halves read
# may lie in each.
_ASSUMED_LATENCY = 10e-6
H100 = Accelerator(
    "H100", 989e12, 3.35e12, 5.5e12, 50 * MB, 450e9, _ASSUMED_LATENCY, usable=0.5
)  # fmt: skip
H200 = Accelerator("H200", 989e12, 4.8e12, 5.5e12, 60 * MB, 450e9, _ASSUMED_LATENCY, usable=0.5)
B200 = Accelerator(
    "B200", 2250e12, 8e12, 12e12, 126 * MB, 900e9, _ASSUMED_LATENCY, usable=0.5
)  # fmt: skip

_ALL = {one.name: one for one in (PAPER, H100, H200, B200)}


def accelerator_named(name: str) -> Accelerator:
    """One of those above; raises NoSuchAccelerator."""
    if name not in _ALL:
        raise NoSuchAccelerator(name=name, known=", ".join(_ALL))
    return _ALL[name]
