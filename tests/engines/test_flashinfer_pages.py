"""FlashInfer's functions around attention: appends, lengths, packed bits, states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flashinfer_reference import Asked, Batch, assert_close, attend

from warploom.engines import flashinfer as calls
from warploom.errors import ArgumentError, BadLength, WrongShape

flashinfer: Any = calls  # whose callers unpack lists of tables
FEW = settings(max_examples=30, deadline=None)
KEYS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 17)), min_size=1, max_size=4)


@FEW
@given(
    KEYS, st.sampled_from(["NHD", "HND"]), st.sampled_from([1, 4]),
    st.sampled_from([torch.float32, torch.float16, torch.float8_e5m2]), st.booleans(),
)  # fmt: skip
def test_appends(
    counts: Any, layout: str, page_size: int, dtype: torch.dtype, is_one: bool
) -> None:
    """The last tokens of each request, behind which a buffer has rows that are none."""
    lengths = [(new, old + new) for new, old in counts]
    batch = Batch.of(lengths, page_size=page_size, layout=layout, kv_dtype=dtype)
    lens = flashinfer.get_seq_lens(batch.indptr, batch.last_page_len, page_size)
    assert lens.tolist() == [keys for _, keys in lengths]
    rows = int(batch.qo_indptr[-1])
    where = flashinfer.get_batch_indices_positions(batch.qo_indptr, lens, rows + 2)
    expected = [(i, p) for i, (n, keys) in enumerate(lengths) for p in range(keys - n, keys)]
    assert list(zip(*(x.tolist() for x in where), strict=True)) == [*expected, (-1, 0), (-1, 0)]
    k, v = (torch.randn(rows + 2, 2, 32).to(dtype) for _ in range(2))
    cache = torch.stack(batch.cache, 1) if is_one else tuple(x.clone() for x in batch.cache)
    flashinfer.append_paged_kv_cache(
        k, v, *where, cache, batch.indices, batch.indptr, batch.last_page_len, layout
    )
    halves = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    for half, before, new in zip(halves, batch.cache, (k, v), strict=True):
        wanted = before.clone()
        for row, (request, position) in enumerate(expected):
            page = batch.indices[batch.indptr[request] + position // page_size]
            slot = position % page_size
            at = (page, slot) if layout == "NHD" else (page, slice(None), slot)
            wanted[at] = new[row]
        assert torch.equal(half.float(), wanted.float())


def test_appends_of_any_positions() -> None:
    batch = Batch.of([(1, 9), (1, 5)])
    k, v = torch.randn(2, 3, 2, 32)
    where = torch.tensor([1, 0, 1]).int(), torch.tensor([4, 2, 0]).int()
    lists = batch.indices, batch.indptr, batch.last_page_len
    flashinfer.append_paged_kv_cache(k, v, *where, batch.cache, *lists)
    pages = [batch.indices[4], batch.indices[0], batch.indices[3]]
    for row, (page, slot) in enumerate(zip(pages, (0, 2, 0), strict=True)):
        assert torch.equal(batch.cache[0][page, slot], k[row])
        assert torch.equal(batch.cache[1][page, slot], v[row])
    with pytest.raises(BadLength, match=r"positions\[1\] is 12"):
        far = torch.tensor([0, 12, 0]).int()
        flashinfer.append_paged_kv_cache(k, v, where[0], far, batch.cache, *lists)


def test_results_are_written_to_tensors_of_the_caller() -> None:
    given = [torch.full((4,), 9, dtype=torch.int32) for _ in range(2)]
    lists = torch.tensor([0, 1, 3]).int(), torch.tensor([5, 4]).int()
    got = flashinfer.get_batch_indices_positions(*lists, 4, *given)
    assert [x.tolist() for x in got] == [[0, 1, 1, -1], [4, 2, 3, 0]]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(got, given, strict=True))
    with pytest.raises(WrongShape, match="positions"):
        flashinfer.get_batch_indices_positions(*lists, 4, given[0], given[1][:2])


@FEW
@given(st.lists(st.integers(0, 20), max_size=5), st.sampled_from(["big", "little"]))
def test_bits_are_those_of_numpy(sizes: list[int], order: Any) -> None:
    flags = torch.rand(sum(sizes)) < 0.5
    begins = torch.tensor([0, *sizes]).cumsum(0)
    packed, indptr = flashinfer.segment_packbits(flags, begins, order)
    parts = [np.packbits(x.numpy(), bitorder=order) for x in flags.split(sizes)]
    assert packed.tolist() == [byte for part in parts for byte in part]
    assert indptr.tolist() == np.cumsum([0, *map(len, parts)]).tolist()
    whole = np.packbits(flags.numpy(), bitorder=order)
    assert flashinfer.packbits(flags, order).tolist() == whole.tolist()
    with pytest.raises(ArgumentError, match="bitorder: is 'middle'"):
        flashinfer.packbits(flags, "middle")
    with pytest.raises(ArgumentError, match="flags; indptr ends with"):
        flashinfer.segment_packbits(flags, begins + 1)


@FEW
@given(st.integers(0, 9), st.integers(0, 9))
def test_states_of_parts_are_those_of_all_keys(first: int, second: int) -> None:
    q, (k, v) = torch.randn(3, 4, 32), torch.randn(2, first + second, 2, 32)
    whole = attend(q, k, v, Asked())
    parts = [attend(q, k[s], v[s], Asked()) for s in (slice(first), slice(first, None))]
    states = [tuple(torch.as_tensor(x).float() for x in part) for part in parts]
    assert_close(flashinfer.merge_state(*states[0], *states[1]), whole)
    stacked = [torch.stack(x, 1) for x in zip(*states, strict=True)]
    assert_close(flashinfer.merge_states(*stacked), whole)
    o, lse = (x.clone() for x in states[0])
    mask = torch.tensor([True, False, True])
    flashinfer.merge_state_in_place(o, lse, *states[1], mask)
    merged = [x.copy() for x in whole]
    for one, first_part in zip(merged, parts[0], strict=True):
        one[1] = first_part[1]
    assert_close((o, lse), (merged[0], merged[1]))
    flashinfer.merge_state_in_place(o := states[0][0], states[0][1], *states[1])
    assert_close((o, states[0][1]), whole)
