"""Attention over NCCL, a GPU for each rank, against the oracle; decodes replayed by CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import nccl_cases
from support.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> Iterator[Ranks]:
    group = Ranks(2, tmp_path_factory.mktemp("ranks"), backend="nccl")
    yield group
    group.close()


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_prefill(ranks: Ranks, method: str) -> None:
    for error, allowed in ranks.run(nccl_cases.prefill, method):
        assert error <= allowed


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("heads", ["all", "own"])
def test_a_graph_replays_decodes(ranks: Ranks, heads: str, on_device: bool) -> None:
    for errors in ranks.run(nccl_cases.decode, heads, on_device):
        for error, allowed in errors:
            assert error <= allowed
