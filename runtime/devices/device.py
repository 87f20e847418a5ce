"""Which back end serves a device, and the facts of a device, looked up once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from warploom.codegen.compilers.arch import Arch, arch_for_capability
from warploom.errors import ArgumentError, NoGpu, UnsupportedSpec

Backend = Literal["cuda", "cpu", "reference"]


@dataclass(frozen=True)
class CudaFacts:
    """What the runtime must know of a CUDA device.

    Attributes:
        name: the driver's name of it.
        arch: architecture to compile for.
        num_sms: streaming multiprocessors.
        l2_bytes: size of the last-level cache.
    """

    name: str
    arch: Arch
    num_sms: int
    l2_bytes: int


@cache
def cuda_facts(index: int) -> CudaFacts:
    properties = torch.cuda.get_device_properties(index)
    arch = arch_for_capability(properties.major, properties.minor)
    return CudaFacts(
        properties.name, arch, properties.multi_processor_count, properties.L2_cache_size
    )


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index; without one, the current CUDA device or else the CPU.

    Raises:
        NoGpu: a CUDA device was asked for and there is none.
        UnsupportedSpec: another kind of device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise _no_back_end(device) from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise _no_back_end(found.type)
    if not torch.cuda.is_available():
        raise NoGpu(reason="torch sees none")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise NoGpu(reason=f"there is no device {index}")
    return torch.device("cuda", index)


def _no_back_end(device: object) -> UnsupportedSpec:
    reason = "back ends are cuda and cpu"
    return UnsupportedSpec(
        what=f"device {device!r}", reason=reason, remedy="Use 'cuda', 'cuda:1' or 'cpu'."
    )


def resolve_backend(backend: str | None, device: torch.device) -> Backend:
    """The back end for a device: its own, or the NumPy reading if asked for by name.

    Raises:
        ArgumentError: no such back end, or one that does not serve this device.
    """
    if backend is None:
        return "cuda" if device.type == "cuda" else "cpu"
    if backend == "reference":
        return "reference"
    if backend == "cuda" and device.type == "cuda":
        return "cuda"
    if backend == "cpu" and device.type == "cpu":
        return "cpu"
    if backend not in ("cuda", "cpu"):
        reason = f"there is no {backend!r}; there are cuda, cpu and reference"
        raise ArgumentError(name="backend", reason=reason)
    remedy = f"move them with .to({backend!r}) and declare device={backend!r}, or leave backend out"
    if backend == "cuda" and not torch.cuda.is_available():
        remedy = "torch sees no CUDA device, so leave backend out"
    reason = f"{backend!r} was asked for, but the tensors or device= are on {device}"
    raise ArgumentError(name="backend", reason=f"{reason}; {remedy} for {device.type!r}")
