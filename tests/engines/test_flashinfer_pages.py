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
from warploom.errors import ArgumentError, BadLength, IndexOutOfRange, WrongShape
from warploom.runtime.strategies.host_strategy import HostStrategy

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


def test_tables_may_be_written_to_behind_plan() -> None:
    """Also where a run of another kind than those before plans again."""
    indptr, indices, last = (torch.tensor(x).int() for x in ([0, 2, 3], [4, 1, 3], [3, 4]))
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
    q, cache = torch.randn(2, 4, 16), torch.randn(6, 2, 4, 2, 16)
    given = {"num_qo_heads": np.int64(4), "num_kv_heads": np.int64(2), "head_dim": np.int64(16)}
    for step in range(3):
        tables = indptr.clone(), indices.clone(), last.clone()
        decode.plan(*tables, **given, page_size=4, q_data_type="float32")
        for table in tables:
            table.zero_()
        found = [decode.run(q, cache, v_scale=scale) for scale in (2.0, None, 2.0)]
        wrapper = decode.wrapper
        assert wrapper is not None and len(decode._ready) == 2, step
        wrapper.plan([0, 1, 2], indptr, indices, last)
        assert torch.equal(found[0], wrapper.run(q, cache, k_scale=1.0, v_scale=2.0))
        torch.testing.assert_close(found[1] * 2, found[0])
        assert torch.equal(found[2], found[0])


@pytest.mark.parametrize("changes", [{"window_left": torch.bfloat16}, {"num_qo_heads": 4.0}])
def test_numbers_that_are_none_are_named(changes: dict[str, Any]) -> None:
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, dtype=torch.uint8))
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4} | changes
    (name,) = changes
    with pytest.raises(ArgumentError, match=f"{name}: is .*; expected an int"):
        decode.plan([0, 1], [0], [1], **given)


def test_names_that_are_not_there_say_what_to_do() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'merge_state'"):
        flashinfer.merge_statse  # noqa: B018
    with pytest.raises(AttributeError, match="keep FlashInfer's"):
        flashinfer.rmsnorm  # noqa: B018


def test_appends_say_what_does_not_fit() -> None:
    k, cache = torch.randn(3, 2, 16), torch.zeros(6, 2, 4, 2, 16)
    lists = [torch.tensor(x).int() for x in ([0, 0, 1], [0, 1, 0], [4, 1], [0, 1, 2], [2, 1])]
    flashinfer.append_paged_kv_cache(k, k, *lists[:2], cache, *lists[2:])
    with pytest.raises(WrongShape, match=r"append_key has shape \(2, 2, 16\).*tokens=3"):
        flashinfer.append_paged_kv_cache(k[:2], k[:2], *lists[:2], cache, *lists[2:])
    with pytest.raises(WrongShape, match=r"heads=4, lanes.*layout HND"):
        flashinfer.append_paged_kv_cache(k, k, *lists[:2], cache, *lists[2:], kv_layout="HND")
    far = torch.tensor([0, 0, 2]).int()
    with pytest.raises(IndexOutOfRange, match=r"batch_indices\[2\] is 2"):
        flashinfer.append_paged_kv_cache(k, k, far, lists[1], cache, *lists[2:])


@pytest.mark.parametrize("last", [-(2**31), -7, 0, 3, 999, 2**31 - 1])
@pytest.mark.parametrize("by_numpy", [False, True])
def test_last_pages_of_requests_without_any_are_not_looked_at(
    last: int, by_numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_numpy:
        monkeypatch.setattr(HostStrategy, "read", lambda *_: None)
        monkeypatch.setattr(HostStrategy, "plan", lambda *_: None)
    batch = Batch.of([(1, 9), (1, 0), (1, 5), (1, 0)])
    lengths = batch.last_page_len.clone()
    lengths[[1, 3]] = last
    workspace, sizes = torch.empty(1, dtype=torch.uint8), (4, 2, 32, 4)
    tables = batch.indptr, batch.indices, lengths
    decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    decode.plan(*tables, *sizes, q_data_type="float32", seq_lens=torch.tensor([9, 0, 5, 0]))
    expected = batch.expected(Asked())
    assert_close(decode.run(batch.q, batch.cache, return_lse=True), expected)
    assert (decode.wrapper.planned.by == "NumPy") == by_numpy
    prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    mask = torch.ones(14, dtype=torch.bool)
    prefill.plan(batch.qo_indptr, *tables, *sizes, custom_mask=mask, q_data_type="float32")
    assert_close(prefill.run(batch.q, batch.cache, return_lse=True), expected)
    pod: Any = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace)
    halves = [
        (rows - rows[0], indptr, batch.indices, ends)
        for rows, indptr, ends in (
            (batch.qo_indptr[:3], batch.indptr[:3], lengths[:2]),
            (batch.qo_indptr[2:], batch.indptr[2:], lengths[2:]),
        )
    ]
    pod.plan(*halves[0], *halves[1], *sizes, q_data_type="float32")
    got = pod.run(batch.q[:2], batch.cache, batch.q[2:], batch.cache)
    assert_close([torch.cat(got)], expected[:1])
    levels: Any = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace)
    levels.plan([batch.qo_indptr], *([x] for x in tables), *sizes, q_data_type="float32")
    assert_close([levels.run(batch.q, batch.cache)], expected[:1])
