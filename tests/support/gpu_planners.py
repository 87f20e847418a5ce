"""What a wrapper on a GPU would plan, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Batch
from warploom.runtime.launching import kernels as kernels_module
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning import rules as rules_module
from warploom.runtime.strategies.planner import Planner

CAUSAL = wl.Causal()
MakePlanner = Callable[..., tuple[Planner, Kernels]]


def declared(variant: wl.Variant = CAUSAL, **given: Any) -> wl.AttentionDeclaration:
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return wl.AttentionDeclaration(variant, **{**sizes, **given})


def planners(monkeypatch: pytest.MonkeyPatch) -> MakePlanner:
    """Makes the planner and the kernels that a wrapper on a GPU would have."""

    def make(declaration: wl.AttentionDeclaration, arch: Arch, sms: int) -> tuple[Planner, Kernels]:
        facts = SimpleNamespace(arch=arch, num_sms=sms, l2_bytes=50 << 20)
        for module in (kernels_module, rules_module):
            monkeypatch.setattr(module, "cuda_facts", lambda _: facts)
        device, nothing = torch.device("cuda", 0), SimpleNamespace(is_given=False)
        spec, heads, options, parts = declaration._checked(arch)
        kernels = Kernels(parts[0], device, *parts[1:])
        made = Planner(
            spec, heads, kernels, nothing, nothing, options, device  # type: ignore[arg-type]
        )  # fmt: skip
        return made, kernels

    return make


def choice(made: Planner, batch: Batch, variant: wl.Variant = CAUSAL) -> TileChoice:
    """The tile of a batch, with the values that a variant was made with."""
    values: Any = SimpleNamespace(scalars=variant.inputs(), known={})
    return made.choice(batch, values)


def of_lengths(q: list[int], keys: int = 40_000) -> Batch:
    ends = np.append(0, np.cumsum(q)).astype(np.int32)
    lengths = [keys if n else 0 for n in q]
    return make_batch(wl.Ragged(), ends, np.append(0, np.cumsum(lengths)).astype(np.int32))
