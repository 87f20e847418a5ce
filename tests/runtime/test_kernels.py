"""Loaded kernels are shared by wrappers whose kernels are the same binary, and by no others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from warploom.codegen import build as build_module
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import Composed, Paged, Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import UnsupportedSpec
from warploom.runtime.devices import loaded
from warploom.runtime.formats import make_batch
from warploom.runtime.launching import kernels
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning.composed import rules_of
from warploom.runtime.planning.rules import Options, Rules
from warploom.runtime.planning.visibility import Heads


def test_kernels_are_known_by_source_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def build(source: Any, target: Any) -> Any:
        loads.append(source.text)
        return build_module.build(source, host_target())

    monkeypatch.setattr(loaded, "build", build)
    monkeypatch.setattr(loaded, "_loaded", {})
    spec = AttentionSpec(trace(Variant()), 64, 64, dtype("float32"), Ragged())
    found = []
    for flags in ((), (), ("-DOTHER",)):
        made = Kernels(spec, torch.device("cpu"))
        made.target = replace(host_target(), flags=(*host_target().flags, *flags))
        choice = made.choose(1.0)
        found.append(made.get(choice))
        assert made.get(TileChoice(choice.tile)) is found[-1]
    assert found[0].bind is found[1].bind
    assert found[0].bind is not found[2].bind
    assert len(loads) == 2
    assert loads[0] == loads[1]


def test_kernels_for_different_numbers_of_threads_are_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(
        loaded.CpuKernel, "launch", lambda self, params, grid, threads: asked.append(threads)
    )
    made = Kernels(
        AttentionSpec(trace(Variant()), 64, 64, dtype("float32"), Ragged()), torch.device("cpu")
    )
    choice = made.choose(1.0)
    for threads in (1, None, 1):
        found = loaded.load(
            made.kernel(choice), made.source(choice), made.target, torch.device("cpu"), 4, threads
        )
        found.bind(None)(0)  # type: ignore[arg-type]
    assert asked == [1, None, 1]


def test_tiles_of_composed_plans_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "cuda_facts", lambda index: SimpleNamespace(num_sms=132))

    def rules(kv_format: Any, tile: TileConfig | None = None) -> Rules:
        spec = AttentionSpec(trace(Variant()), 128, 128, dtype("bfloat16"), kv_format)
        made = Kernels(spec, torch.device("cpu"))
        made.target = arch_named("sm_90a")
        options = Options(None, False, False, None, tile)
        return rules_of(spec, made, Heads(8, 2), options, torch.device("cuda", 0))

    assert min(choice.tile.rows for choice in rules(Paged(16)).choices()) == 16
    assert {choice.tile.rows for choice in rules(Composed(16)).choices()} == {16, 64, 128}
    for prefix, batch, rows in ((1024, 16, 16), (8192, 64, 128)):
        table = [range(prefix // 16)] * batch
        pages = np.array([[*shared, prefix + i] for i, shared in enumerate(table)], np.int32)
        indptr = np.arange(batch + 1, dtype=np.int32)
        qo, last = indptr, np.full(batch, 16, np.int32)
        planned = make_batch(Composed(16), qo, indptr * pages.shape[1], pages.ravel(), last)
        choice = rules(Composed(16)).one_tile(planned)
        assert choice.tile.rows == rows
        assert "shared prefixes" in choice.reason
    streamed = TileConfig(16, 32, 2, 2)
    assert rules(Composed(16), streamed).choices() == [TileChoice(streamed)]
    spec = AttentionSpec(trace(Variant()), 128, 128, dtype("bfloat16"), Composed(16))
    made = KernelChoice(spec, arch_named("sm_90a"))
    with pytest.raises(UnsupportedSpec, match=r"1x64.*several requests share a tile.* 16 rows"):
        made.kernel(made.given(TileConfig(1, 64, 4, 1)))
