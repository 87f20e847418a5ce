"""Which batches are partitioned by Stream-K on a GPU, by their own numbers or by bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.runtime.formats.batch import OnDevice
from warploom.runtime.planning import rules
from warploom.runtime.planning.planner_kinds import may_be_longest_first
from warploom.runtime.planning.rules import Options, Rules
from warploom.runtime.planning.visibility import Heads
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.problem import Partition

TILE = TileConfig(128, 128, 8, 2)


def uses_stream_k(
    rows: int,
    segments: int,
    heads: tuple[int, int],
    device: str = "cuda:0",
    on_device: bool = False,
    **options: Any,
) -> bool:
    chosen = Options(**{**dict.fromkeys(Options.__dataclass_fields__), **options})  # type: ignore[arg-type]
    spec = AttentionSpec(trace(Variant()), 128, 128, dtype("bfloat16"), Ragged())
    nothing: Any = SimpleNamespace(choose=len)  # kernels are not asked
    of = Rules(spec, nothing, Heads(*heads), chosen, torch.device(device))
    sizes = SimpleNamespace(segment_rows=rows, num_segments=segments)
    batch: Any = SimpleNamespace(sizes=sizes)
    if on_device and chosen.bounds is not None:
        batch = OnDevice.of((None,) * 4, segments, rows, chosen.bounds)
    found = of.partition(batch, TILE)
    is_fixed = bool(options.get("batch_invariant"))
    assert found in ([Partition.FIXED] if is_fixed else [Partition.LINES, Partition.LONGEST_FIRST])
    return found is Partition.LINES


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "cuda_facts", lambda index: SimpleNamespace(num_sms=132))


def test_few_tiles_of_a_segment() -> None:
    assert uses_stream_k(16, 16, (32, 8))
    assert uses_stream_k(16, 16, (32, 8), device="cpu")
    assert not uses_stream_k(4096, 1, (32, 8))
    assert not uses_stream_k(16, 16, (32, 8), batch_invariant=True)


def test_tiles_that_leave_half_of_the_sms_without_one() -> None:
    assert uses_stream_k(128, 1, (32, 8))  # 4 tiles and one for what is left, of 8 heads
    assert not uses_stream_k(256, 1, (32, 8))
    assert not uses_stream_k(128, 1, (32, 8), sm_limit=64)
    assert not uses_stream_k(128, 1, (32, 8), device="cpu")


def test_bounds_decide_for_batches_whose_lengths_lie_on_the_device() -> None:
    """These are planned alike; of others each is planned as if there were no bounds."""
    long = Bounds(max_requests=1, max_q_rows=4096, max_kv_len=8192, max_blocks=8192)
    for bounds, is_few in ((long, False), (Bounds(1, 128, 8192, 8192), True)):
        for rows, here in ((128, True), (4096, False)):
            assert uses_stream_k(rows, 1, (32, 8), bounds=bounds) == here
            assert uses_stream_k(rows, 1, (32, 8), on_device=True, bounds=bounds) == is_few


@given(st.integers(0, 40), st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([1, 4, 8]))
@example(0, 0, 1, 1)  # nothing is longest first
def test_who_may_be_planned_longest_first_is_known_ahead(
    segments: int, rows: int, unused: int, group: int
) -> None:
    """What is built ahead, and what `warm_up` builds, asks the bounds alone."""
    bounds = Bounds(max(1, segments), rows + unused, 8192, 8192)
    if not uses_stream_k(rows, segments, (8 * group, 8), device="cpu", bounds=bounds):
        options = Options(**{**dict.fromkeys(Options.__dataclass_fields__), "bounds": bounds})  # type: ignore[arg-type]
        assert may_be_longest_first(TILE, options, group)
