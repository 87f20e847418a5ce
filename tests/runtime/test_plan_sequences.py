"""Plans of one wrapper leave nothing behind: each one runs as in a new wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.types.formats import KVFormat, Paged, Ragged
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds

PAGE = 4
POOL = torch.randn(2, 72_000, 4, 32, generator=torch.Generator().manual_seed(0))
QUERIES = torch.randn(9600, 4, 32, generator=torch.Generator().manual_seed(1))

# Query rows and keys of requests: tiles of every height, keys that are split and keys that are not.
lengths = st.tuples(
    st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 40), st.sampled_from([100, 400])),
    st.one_of(st.sampled_from([0, 1]), st.integers(0, 200), st.sampled_from([1000, 3000])),
)
batches = st.lists(lengths, max_size=6)
uniform = st.builds(lambda one, n: [one] * n, lengths, st.integers(1, 24))
sequences = st.lists(st.one_of(batches, uniform), min_size=2, max_size=5)
LARGEST: dict[str, int] = {"max_requests": 24, "max_q_rows": 9600, "max_kv_len": 3000}


def make(kv_format: KVFormat, left: int | None, heads: int, **options: Any) -> AttentionWrapper:
    variant = None if left is None else SlidingWindow(left=left)
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": heads, "head_dim": 32}
    return AttentionWrapper(
        variant, kv_format=kv_format, **shape, dtype="float32", device="cpu", **options
    )


def planned(
    wrapper: AttentionWrapper, heads: int, batch: list[tuple[int, int]]
) -> tuple[torch.Tensor, Any]:
    """Outputs and log-sum-exps of a batch."""
    q_rows = torch.tensor([0, *(q for q, _ in batch)]).cumsum(0).int()
    keys = torch.tensor([kv for _, kv in batch], dtype=torch.int32)
    k, v = POOL[:, :, :heads]
    if isinstance(wrapper.kv_format, Paged):
        pages = (keys + PAGE - 1) // PAGE
        indptr = torch.cat((torch.zeros(1), pages.cumsum(0))).int()
        order = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(2)).int()
        wrapper.plan(q_rows, indptr, order, (keys - 1) % PAGE + 1)
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (k, v))
    else:
        indptr = torch.cat((torch.zeros(1), keys.cumsum(0))).int()
        wrapper.plan(q_rows, indptr)
        k, v = (x[: int(indptr[-1])] for x in (k, v))
    return wrapper.run(QUERIES[: int(q_rows[-1])], (k, v), return_lse=True)


@pytest.mark.parametrize("memory", ["own", "given", "bounded"])
@settings(max_examples=6)
@given(
    kv_format=st.sampled_from([Ragged(), Paged(PAGE)]),
    left=st.sampled_from([None, 64]),
    kv_heads=st.sampled_from([2, 4]),
    sequence=sequences,
)
@example(  # tiles of 12, then of 48 rows, whose plans take the same room
    kv_format=Ragged(),
    left=None,
    kv_heads=4,
    sequence=[[(1, 3000)] * 16, [(16, 3000), *[(0, 3000)] * 15]],
)
def test_plans_leave_nothing_behind(
    memory: str,
    kv_format: KVFormat,
    left: int | None,
    kv_heads: int,
    sequence: list[list[tuple[int, int]]],
) -> None:
    options: dict[str, Any] = {
        "own": {},
        "given": {"workspace": torch.full((64 << 20,), 0xAB, dtype=torch.uint8)},
        "bounded": {"bounds": Bounds(**LARGEST, max_blocks=18_000 if kv_format.block_kv else 0)},
    }[memory]
    wrapper = make(kv_format, left, kv_heads, **options)
    for batch in sequence:
        found = planned(wrapper, kv_heads, batch)
        alone = planned(make(kv_format, left, kv_heads, **options), kv_heads, batch)
        assert all(map(torch.equal, found, alone))
