"""Loaded kernels are shared by wrappers whose kernels are the same binary, and by no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from warploom.codegen.hostcc import host_target
from warploom.dsl.dtypes import dtype
from warploom.dsl.formats import Ragged
from warploom.dsl.spec import AttentionSpec
from warploom.dsl.trace import trace
from warploom.dsl.variant import Variant
from warploom.runtime import kernels
from warploom.runtime.kernels import Kernels


def test_kernels_are_known_by_source_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def load(self: Kernels, tile: Any, source: Any, artifact: Any) -> Any:
        loads.append(source.text)
        return object()

    monkeypatch.setattr(Kernels, "_load", load)
    monkeypatch.setattr(kernels, "build", lambda source, target: None)
    monkeypatch.setattr(kernels, "_loaded", {})
    spec = AttentionSpec(trace(Variant()), 64, 64, dtype("float32"), Ragged())
    found = []
    for flags in ((), (), ("-DOTHER",)):
        made = Kernels(spec, torch.device("cpu"))
        made.target = replace(host_target(), flags=(*host_target().flags, *flags))
        tile = made.choose(1.0)
        found.append(made.get(tile))
        assert made.get(tile) is found[-1]
    assert found[0] is found[1]
    assert found[0] is not found[2]
    assert len(loads) == 2
    assert loads[0] == loads[1]
