"""A stand-in for a collective: a kernel that holds some SMs for a given time, and does nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from warploom.codegen.abi import Packer, ParamField, struct_text
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.kinds import KernelSpec, Language
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.source import KernelSource
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.loaded import load
from warploom.runtime.devices.params import Block

_FIELDS = (ParamField("long long", "nanoseconds", "how long"),)
_THREADS = 128
_TEXT = """
%s

extern "C" __global__ void __launch_bounds__(128) %s(const __grid_constant__ Params p) {
  long long begin, now;
  asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < p.nanoseconds);
}
"""


@dataclass(frozen=True)
class StandInSpec(KernelSpec):
    """Its shared memory is more than half of an SM's, so that each CTA has one."""

    kind = "stand-in"

    @property
    def name(self) -> str:
        return "stand_in"

    @property
    def fields(self) -> tuple[ParamField, ...]:
        return _FIELDS

    @property
    def labels(self) -> Mapping[str, str]:
        return {"kind": self.kind}

    def context(self) -> Mapping[str, Any]:
        return {}

    def launch(self, arch: Arch) -> LaunchShape:
        return LaunchShape(_THREADS, arch.shared_per_sm // 2, 1)

    def render(self, language: Language, plan_structs: str = "") -> KernelSource:
        text = _TEXT % (struct_text(_FIELDS), self.entry)
        return KernelSource(self.name, text, language, self.entry, (("kind", self.kind),))


class StandIn:
    """A collective of known duration on so many SMs. On the CPU it keeps the thread busy."""

    def __init__(self, device: torch.device, sms: int) -> None:
        self._device = device
        if device.type == "cpu":
            return
        spec, packer = StandInSpec(), Packer(_FIELDS)
        self._block = Block(packer, packer.size)
        arch = cuda_facts(device.index).arch
        self._launch = load(spec, spec.render("cuda"), arch, device, sms).bind(self._block)

    def __call__(self, seconds: float) -> None:
        if self._device.type == "cpu":
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return
        self._block.set("nanoseconds", round(seconds * 1e9))
        self._launch(torch.cuda.current_stream(self._device).cuda_stream)
