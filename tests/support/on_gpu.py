"""Plans as a wrapper on an H200 makes them, in memory of the host, and batches for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.gpu_planners import declared
from warploom.codegen.compilers.arch import ARCHS
from warploom.dsl.types.formats import KVFormat
from warploom.runtime.devices import graph
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.upload import Upload
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.launching import kernels as kernels_module
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning import rules as rules_module
from warploom.runtime.strategies.planner import Planner
from warploom.runtime.strategies.strategy import Planned

Lengths = list[tuple[int, int]]  # rows and keys of each request
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def arguments(lengths: Lengths, kv_format: KVFormat, seed: int = 0) -> Arguments:
    """Index arrays as a server has them: int32 tensors."""
    rows, keys = np.array(lengths, np.int64).reshape(-1, 2).T
    qo, page = np.append(0, np.cumsum(rows)), kv_format.block_kv or 1
    kv = np.append(0, np.cumsum(-(-keys // page)))
    if not kv_format.block_kv:
        return Arguments(_tensor(qo), _tensor(kv))
    pages = np.random.default_rng(seed).permutation(int(kv[-1]))
    last = np.where(keys > 0, (keys - 1) % page + 1, 0)
    return Arguments(_tensor(qo), _tensor(kv), _tensor(pages), _tensor(last))


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


def same_plans(found: Planned, expected: Planned) -> None:
    """Both say the same of the same batch."""
    assert found.choice.tile == expected.choice.tile and found.by == expected.by
    assert found.batch.sizes == expected.batch.sizes
    assert found.batch.q_rows == expected.batch.q_rows
    assert found.batch.kv_extent == expected.batch.kv_extent
    mine, other = found.plan, expected.plan
    for name in ("header", "cta_indptr", "items", "segments", "merges", "indices"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name), err_msg=name)


class OnGpu:
    """Plans as a wrapper on an H200 makes them, in memory of the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **declaration: Any) -> None:
        facts = SimpleNamespace(arch=ARCHS["sm_90a"], num_sms=132, l2_bytes=50 << 20)
        for module in (kernels_module, rules_module):
            monkeypatch.setattr(module, "cuda_facts", lambda _: facts)
        monkeypatch.setattr(graph, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        spec, heads, options, parts = declared(**declaration)._checked(facts.arch)
        kernels: Any = Kernels(parts[0], GPU, *parts[1:])
        made: dict[Any, Any] = {}
        kernels.get = lambda choice: made.setdefault(
            id(choice), SimpleNamespace(tile=choice.tile, num_ctas=132, choice=choice)
        )
        workspace = Workspace(CPU)
        self.planner = Planner(spec, heads, kernels, workspace, ParamBlock(spec), options, GPU)
        self.planner._memory.upload = Upload(CPU)
        self.inputs: Any = SimpleNamespace(scalars=dict(declaration["variant"].inputs()), known={})

    def plan(self, batch: Arguments, is_short: bool) -> tuple[Planned, bool]:
        """A plan, and whether it was made in few calls, which may be forbidden."""
        planned = self.planner.replan(batch) if is_short else None
        if planned is not None:
            return planned, True
        return self.planner.plan(self.planner.read(batch), self.inputs), False
