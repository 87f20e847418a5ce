"""Prefetches that the pass inserts beside NCCL's collectives, on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.prefetching_ranks import check_two_ranks


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_the_same_with_and_without(tmp_path: Path) -> None:
    """Inductor and AOTAutograd, weights cut by hand and by DTensor."""
    check_two_ranks(tmp_path, "cuda")
