"""Kernels that bring memory into the last-level cache, and have no other effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.codegen.abi import ParamField
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.kinds import KernelSpec, Language
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.render import config_struct

THREADS = 128  # of a CTA
SOURCES = ("first_source", "second_source")

_RECORD = (
    ("offset", "long long", "from the source, in bytes; of the first record: how many follow"),
    ("bytes", "int", "how many; the memory around is fetched up to whole lines"),
    ("source", "int", "which of the sources"),
)
_FIELDS = (
    ParamField("const PrefetchSpan*", "spans", "a record that counts the others, and those"),
    *(ParamField("const char*", name, "what offsets count from, or null") for name in SOURCES),
)

# a record of the table that the kernel reads
SPAN = np.dtype([(name, np.int64 if kind != "int" else np.int32) for name, kind, _ in _RECORD])


@dataclass(frozen=True)
class PrefetchSpec(KernelSpec):
    """Everything such a kernel is compiled for.

    Attributes:
        keep: lines are marked as the last to be evicted (`L2::evict_last`).
    """

    keep: bool = False

    kind = "prefetch"

    @property
    def name(self) -> str:
        return "prefetch_keep" if self.keep else "prefetch"

    @property
    def fields(self) -> tuple[ParamField, ...]:
        return _FIELDS

    @property
    def labels(self) -> Mapping[str, str]:
        return {"kind": self.kind}

    @property
    def about(self) -> str:
        """No variant: it fetches what it is told to."""
        return ""

    def variant_struct(self, language: Language) -> str:
        return ""

    def context(self) -> Mapping[str, Any]:
        lines = [f"  {kind} {name};  // {meaning}" for name, kind, meaning in _RECORD]
        return {
            "span_struct": "\n".join(["struct alignas(16) PrefetchSpan {", *lines, "};"]),
            "config_struct": config_struct({"keep": self.keep}),
            "threads": THREADS,
        }

    def launch(self, arch: Arch) -> LaunchShape:
        return LaunchShape(THREADS, 0, 1)
