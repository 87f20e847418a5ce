"""What each CUDA architecture offers, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import UnknownArchitecture

_KIB = 1024


# On all architectures so far.
REGISTERS_PER_SM = 65536  # of 32 bits
THREADS_PER_CTA = 1024


@dataclass(frozen=True)
class Arch:
    """One architecture that kernels are compiled for.

    Attributes:
        name: as `sm_90a`; the `a` means that the cubin runs on exactly this capability.
        capability: compute capability (major, minor).
        shared_per_cta: bytes of shared memory one CTA may use after opting in.
        shared_per_sm: bytes of shared memory of an SM, of which each CTA costs 1 KiB extra.
        threads_per_sm: threads an SM can hold.
    """

    name: str
    capability: tuple[int, int]
    shared_per_cta: int
    shared_per_sm: int
    threads_per_sm: int

    @property
    def flag(self) -> str:
        """NVRTC's option that selects a cubin for this architecture."""
        return f"--gpu-architecture={self.name}"

    @property
    def overlaps(self) -> bool:
        """Whether kernels can begin while the one before them ends (decision 0022)."""
        return self.capability >= (9, 0)

    def key_parts(self) -> dict[str, str]:
        """What of the target a cache key must hold."""
        return {"arch": self.name}


# CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), 163 * _KIB, 164 * _KIB, 2048),
        Arch("sm_86", (8, 6), 99 * _KIB, 100 * _KIB, 1536),
        Arch("sm_87", (8, 7), 163 * _KIB, 164 * _KIB, 1536),
        Arch("sm_89", (8, 9), 99 * _KIB, 100 * _KIB, 1536),
        Arch("sm_90a", (9, 0), 227 * _KIB, 228 * _KIB, 2048),
        Arch("sm_100", (10, 0), 227 * _KIB, 228 * _KIB, 2048),
        Arch("sm_120", (12, 0), 99 * _KIB, 100 * _KIB, 1536),
    )
}

# A cubin without the `a` also runs on later minors of its major; these have the same shared memory.
# Nothing in the portable template needs the `a`, so B300 (10.3) runs what is compiled for B200.
_SAME_AS = {(10, 3): (10, 0), (12, 1): (12, 0)}


def arch_named(name: str) -> Arch:
    """The architecture of that name.

    Raises:
        UnknownArchitecture: the table has no such name.
    """
    if name not in ARCHS:
        raise UnknownArchitecture(name=name, known=", ".join(ARCHS))
    return ARCHS[name]


def arch_for_capability(major: int, minor: int) -> Arch:
    """The architecture to compile for on a device of this compute capability.

    Raises:
        UnknownArchitecture: no cubin of ours runs on such a device.
    """
    capability = _SAME_AS.get((major, minor), (major, minor))
    for arch in ARCHS.values():
        if arch.capability == capability:
            return arch
    raise UnknownArchitecture(name=f"compute capability {major}.{minor}", known=", ".join(ARCHS))
