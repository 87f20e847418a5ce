"""FlashInfer's other calls of attention, beside attention in NumPy float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flashinfer_reference import Asked, Batch, assert_close, attend

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines import flashinfer as calls
from warploom.errors import ArgumentError, BadLength, BoundsExceeded, WrongShape

flashinfer: Any = calls  # whose callers unpack lists of tables
WORKSPACE = torch.empty(1, dtype=torch.uint8)
F32 = {"q_data_type": "float32"}
FEW = settings(max_examples=20, deadline=None)

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 23)), min_size=1, max_size=4)
ASKED = st.sampled_from(
    [
        Asked(window=3),
        Asked(causal=True, encoding="ROPE_LLAMA", rope_scale=2.0, sm_scale=0.2),
        Asked(causal=True, cap=3.0, encoding="ALIBI"),
    ]
)
LAYOUTS = st.sampled_from(["NHD", "HND"])


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "NHD" else x.transpose(0, 1).contiguous()


@FEW
@given(LENGTHS, ASKED, LAYOUTS, st.booleans())
def test_ragged(lengths: Any, asked: Asked, layout: str, is_masked: bool) -> None:
    batch = Batch.of(lengths)
    masks = [torch.rand(one) < 0.7 for one in lengths]
    mask = torch.cat([one.flatten() for one in masks]) if is_masked else None
    begins = torch.tensor([0, *(keys for _, keys in lengths)]).cumsum(0).int()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(
        batch.qo_indptr, begins, 4, 2, 32, custom_mask=mask, causal=asked.causal, **asked.planned,
        **F32,
    )  # fmt: skip
    k, v = (laid(torch.cat(x), layout) for x in (batch.keys, batch.values))
    each = [replace(asked, mask=one) if is_masked else asked for one in masks]
    assert_close(wrapper.run_return_lse(batch.q, k, v), batch.expected(each))
    if not is_masked:
        scaled = replace(asked, factor=0.5, v_scale=2.0)
        got = wrapper.run(batch.q, k, v, k_scale=0.5, v_scale=2.0, return_lse=True)
        assert_close(got, batch.expected(scaled))


def test_ragged_within_the_buffers_of_a_graph() -> None:
    buffers = [torch.zeros(3, dtype=torch.int32)] * 2
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    for lengths in ([(4, 9), (3, 14)], [(1, 3), (5, 9)]):
        batch = Batch.of(lengths)
        begins = torch.tensor([0, *(keys for _, keys in lengths)]).cumsum(0).int()
        wrapper.plan(batch.qo_indptr, begins, 4, 2, 32, causal=True, **F32)
        got = wrapper.run_return_lse(batch.q, torch.cat(batch.keys), torch.cat(batch.values))
        assert_close(got, batch.expected(Asked(causal=True)))
    with pytest.raises(BoundsExceeded):
        wrapper.plan(torch.tensor([0, 4, 8]).int(), begins, 4, 2, 32, causal=True, **F32)


@FEW
@given(
    st.integers(0, 6), st.integers(0, 23), ASKED, LAYOUTS, st.sampled_from(["", "custom", "packed"])
)  # fmt: skip
def test_single_prefill(rows: int, keys: int, asked: Asked, layout: str, masked: str) -> None:
    batch = Batch.of([(rows, keys)])
    mask = torch.rand(rows, keys) < 0.7
    given: dict[str, Any] = {}
    if masked:
        given[f"{masked}_mask" if masked == "custom" else "packed_custom_mask"] = (
            mask if masked == "custom" else flashinfer.packbits(mask, bitorder="little")
        )
    k, v = (laid(x[0], layout) for x in (batch.keys, batch.values))
    got = flashinfer.single_prefill_with_kv_cache_return_lse(
        batch.q, k, v, causal=asked.causal, kv_layout=layout, k_scale=0.5, v_scale=1.5, **given,
        **asked.planned,
    )  # fmt: skip
    asked = replace(asked, factor=0.5, v_scale=1.5, mask=mask if masked else None)
    assert_close(got, batch.expected(asked))


@FEW
@given(st.integers(0, 23), ASKED, LAYOUTS)
def test_single_decode(keys: int, asked: Asked, layout: str) -> None:
    batch = Batch.of([(1, keys)])
    k, v = (laid(x[0], layout) for x in (batch.keys, batch.values))
    out, lse = flashinfer.single_decode_with_kv_cache_return_lse(
        batch.q[0], k, v, layout, q_scale=0.5, **asked.planned
    )
    expected = batch.expected(replace(asked, causal=False, factor=0.5))
    assert_close((out[None], lse[None]), expected)
    half = flashinfer.single_prefill_with_kv_cache(
        batch.q, k, v, kv_layout=layout, o_dtype=torch.float16
    )
    assert half.dtype == torch.float16
    assert_close((half, lse[None]), (batch.expected(Asked())[0], lse[None].numpy()), 2e-3)


@FEW
@given(LENGTHS, st.booleans())
def test_any_rows(lengths: Any, causal: bool) -> None:
    batch, asked = Batch.of(lengths), Asked(causal=causal, cap=2.0)
    wrapper = flashinfer.BatchAttention(device="cpu")
    keys = torch.tensor([n for _, n in lengths])
    lists = batch.qo_indptr, batch.indptr, batch.indices
    types = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    wrapper.plan(
        *lists, keys, 4, 2, 32, 32, 4, causal, logits_soft_cap=2.0, **types
    )  # fmt: skip
    assert_close(wrapper.run(batch.q, batch.cache, logits_soft_cap=2.0), batch.expected(asked))
    fewer = (keys - 5).clamp(min=0)  # fewer than the pages hold: the last ones are left out
    wrapper.plan(*lists, fewer, 4, 2, 32, 32, 4, causal, **types)
    short = replace(
        batch,
        keys=[x[:n] for x, n in zip(batch.keys, fewer.tolist(), strict=True)],
        values=[x[:n] for x, n in zip(batch.values, fewer.tolist(), strict=True)],
    )
    got = wrapper.run(batch.q, batch.cache)
    assert_close(got, short.expected(Asked(causal=causal)))
    with pytest.raises(ArgumentError, match="logits_soft_cap: is 3"):
        wrapper.run(batch.q, batch.cache, logits_soft_cap=3.0)
    with pytest.raises(BadLength, match="kv_len_arr"):
        wrapper.plan(*lists, keys + 9, 4, 2, 32, 32, 4, causal, **types)


def test_sinks_by_position() -> None:
    batch, sinks = Batch.of([(2, 9), (1, 4)]), torch.randn(4)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, window_left=3)
    lists = batch.qo_indptr, batch.indptr, batch.indices, batch.last_page_len
    wrapper.plan(*lists, 4, 2, 32, 4, causal=True, window_left=3, **F32)
    got = wrapper.run(batch.q, batch.cache, sinks, 0.3, return_lse=True)
    asked = Asked(causal=True, window=3, sm_scale=0.3, sinks=sinks)
    assert_close(got, batch.expected(asked))
    with pytest.raises(ArgumentError, match="expected sinks and sm_scale"):
        wrapper.run(batch.q, batch.cache, sinks)


@FEW
@given(
    LENGTHS, st.lists(st.integers(0, 23), max_size=3), st.booleans(), st.booleans(),
    st.sampled_from([{}, {"q_scale": 1.5, "k_scale": 0.5}, {"v_scale": 2.0}]),
    st.sampled_from(["NONE", "ROPE_LLAMA", "ALIBI"]),
)  # fmt: skip
def test_prefills_and_decodes_of_one_cache(
    lengths: Any, decodes: list[int], causal: bool, is_masked: bool, scales: Any, encoding: str
) -> None:
    batch = Batch.of([*lengths, *((1, keys) for keys in decodes)])
    count, rows = len(lengths), int(batch.qo_indptr[len(lengths)])
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(
        batch.qo_indptr[: count + 1], batch.indptr[: count + 1], batch.indices,
        batch.last_page_len[:count], batch.qo_indptr[count:] - rows, batch.indptr[count:],
        batch.indices, batch.last_page_len[count:], 4, 2, 32, 4, encoding,
        window_left=7, **F32,
    )  # fmt: skip
    asked = Asked(causal=causal, window=7, encoding=encoding)
    factor = scales.get("q_scale", 1.0) * scales.get("k_scale", 1.0)
    scaled = replace(asked, causal=False, factor=factor, v_scale=scales.get("v_scale", 1.0))
    for masked in (False, is_masked, False):
        masks = [torch.rand(one) < 0.7 for one in lengths]
        custom = torch.cat([one.flatten() for one in masks]) if masked else None
        got = wrapper.run(
            batch.q[:rows], batch.cache, batch.q[rows:], batch.cache, custom, causal_p=causal,
            return_lse=True, **scales,
        )  # fmt: skip
        each = [replace(asked, mask=one) if masked else asked for one in masks]
        each += [scaled] * len(decodes)
        assert_close([torch.cat(x) for x in got], batch.expected(each))


def test_scales_hold_for_the_decodes_of_each_plan() -> None:
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    for prefills in (1, 2):
        batch = Batch.of([(2, 9), (1, 6), (1, 4)], seed=prefills)
        rows, lists = prefills + 1, (batch.indptr, batch.indices, batch.last_page_len)
        wrapper.plan(
            batch.qo_indptr[: prefills + 1], lists[0][: prefills + 1], lists[1],
            lists[2][:prefills], batch.qo_indptr[prefills:] - rows, lists[0][prefills:], lists[1],
            lists[2][prefills:], 4, 2, 32, 4, **F32,
        )  # fmt: skip
        q = batch.q.split([rows, 4 - rows])
        got = wrapper.run(q[0], batch.cache, q[1], batch.cache, k_scale=0.5, v_scale=2.0,
            return_lse=True)  # fmt: skip
        asked = [Asked()] * prefills + [Asked(factor=0.5, v_scale=2.0)] * (3 - prefills)
        assert_close([torch.cat(x) for x in got], batch.expected(asked))


def test_prefills_and_decodes_of_two_caches_are_refused() -> None:
    batch = Batch.of([(2, 9), (2, 4)])
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    halves = (
        *(batch.qo_indptr[:2], batch.indptr[:2], batch.indices, batch.last_page_len[:1]),
        *(batch.qo_indptr[1:] - 2, batch.indptr[1:], batch.indices, batch.last_page_len[1:]),
    )
    wrapper.plan(*halves, 4, 2, 32, 4, **F32)
    other = tuple(x.clone() for x in batch.cache)
    with pytest.raises(ArgumentError, match="one launch reads one cache"):
        wrapper.run(batch.q[:2], batch.cache, batch.q[2:], other)
    with pytest.raises(ArgumentError, match=r"3 and 1 rows; plan\(\) was given \(2, 2\)"):
        wrapper.run(batch.q[:3], batch.cache, batch.q[3:], batch.cache)
    with pytest.raises(UnsupportedByEngine, match="several rows"):
        wrapper.run(batch.q[:2], batch.cache, batch.q[2:], batch.cache, causal_p=True)
    with pytest.raises(ArgumentError, match=r"^k_scale: -0\.5 is not above 0"):
        wrapper.run(batch.q[:2], batch.cache, batch.q[2:], batch.cache, k_scale=-0.5)
    apart = wrapper.run(batch.q[:2].clone(), batch.cache, batch.q[2:], batch.cache)
    together = wrapper.run(batch.q[:2], batch.cache, batch.q[2:], batch.cache)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(4, 23)), min_size=1, max_size=4),
    st.integers(0, 3), st.integers(0, 2), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_levels(lengths: Any, shared: int, between: int, causal: bool, seed: int) -> None:
    batch = Batch.of(lengths, seed=seed)
    rows, count, half = batch.qo_indptr, len(lengths), len(lengths) // 2
    free = [p for p in range(len(batch.cache[0])) if p not in batch.indices.tolist()]
    free += free  # a page may be shared twice
    own = [free[:shared], free[3 : 3 + between], []]
    i32: dict[str, Any] = {"dtype": torch.int32}
    levels = [
        (torch.tensor([0, rows[-1]], **i32), [0, shared], own[0], [4]),
        (torch.tensor([0, rows[half], rows[-1]], **i32), [0, between, between], own[1], [4, 0]),
        (rows, batch.indptr, batch.indices, batch.last_page_len),
    ]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE)
    given = [[torch.as_tensor(x, **i32) for x in one] for one in zip(*levels, strict=True)]
    wrapper.plan(*given, 4, 2, 32, 4, causal, logits_soft_cap=3.0, **F32)
    begin = int(torch.searchsorted(rows, rows[half]))
    each = [own[0] + (own[1] if at < begin else []) for at in range(count)]
    longer = [
        [torch.cat((x[pages].flatten(0, 1), one)) for pages, one in zip(each, ends, strict=True)]
        for x, ends in zip(batch.cache, (batch.keys, batch.values), strict=True)
    ]
    whole = replace(batch, keys=longer[0], values=longer[1])
    expected = whole.expected(Asked(causal=causal, cap=3.0))
    assert_close([wrapper.run(batch.q, batch.cache)], expected[:1])


def test_levels_within_the_buffers_of_a_graph() -> None:
    sizes = ([2, 3], [2, 3], [2, 9], [1, 2])  # rows, begins, pages and lengths of both levels
    buffers = [[torch.zeros(n, dtype=torch.int32) for n in level] for level in sizes]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True, *buffers)
    for lengths in ([(4, 9), (3, 14)], [(1, 3), (5, 9)]):
        batch = Batch.of(lengths)
        page = min(set(range(len(batch.cache[0]))) - set(batch.indices.tolist()))
        rows = [0, sum(n for n, _ in lengths)], batch.qo_indptr
        tables = ([0, 1], batch.indptr), ([page], batch.indices), ([4], batch.last_page_len)
        wrapper.plan(rows, *tables, 4, 2, 32, 4, True, **F32)
        longer = [
            [torch.cat((x[page], one)) for one in ends]
            for x, ends in zip(batch.cache, (batch.keys, batch.values), strict=True)
        ]
        whole = replace(batch, keys=longer[0], values=longer[1])
        expected = whole.expected(Asked(causal=True))
        assert_close([wrapper.run(batch.q, batch.cache)], expected[:1])


def test_levels_that_are_refused() -> None:
    batch = Batch.of([(2, 9), (3, 4)])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)

    def plan(rows: Any = (0, 5), last: Any = (4,), **more: Any) -> None:
        tables = ([0, 1], batch.indptr), ([0], batch.indices), (list(last), batch.last_page_len)
        wrapper.plan((list(rows), batch.qo_indptr), *tables, 4, 2, 32, 4, **more, **F32)

    plan()
    with pytest.raises(ArgumentError, match="no begins of requests"):
        plan((0, 3))
    with pytest.raises(ArgumentError, match="share full pages only"):
        plan(last=(3,))
    for name, value in (("window_left", 3), ("pos_encoding_mode", "ALIBI")):
        told = rf"serve {name}={value!r} of a cascade .* count anew .*Composed\(page_size\)"
        with pytest.raises(UnsupportedByEngine, match=told):
            plan(**{name: value})
    with pytest.raises(ArgumentError, match="fewer keys than rows"):
        wrapper.plan(
            ([0, 5], [0, 5]), ([0, 1], [0, 1]), ([0], [1]), ([4], [4]), 4, 2, 32, 4, True, **F32
        )
    with pytest.raises(ArgumentError, match="levels; expected 2"):
        wrapper.plan(([0, 5],), ([0, 1],), ([0],), ([4],), 4, 2, 32, 4, **F32)


@FEW
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4)), st.sampled_from([(1, 3), (4, 5)]),
    st.sampled_from(["", "mask", "packed_mask"]), st.integers(0, 2), st.integers(0, 99),
)  # fmt: skip
def test_blocks(counts: Any, block: Any, masked: str, cut: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (high, wide), (r, c) = counts, block
    m, n = max(high * r - cut, (high - 1) * r + 1), wide * c
    seen = rng.random((high, wide)) < 0.6
    indptr = np.cumsum([0, *seen.sum(1)]).astype(np.int32)
    indices = np.nonzero(seen)[1].astype(np.int32)
    flags = rng.random((high, r, wide, c)) < 0.7
    blocks = flags.transpose(0, 2, 1, 3)[seen]
    whole = seen[:, None, :, None] & (flags if masked else np.ones_like(flags))
    mask = whole.reshape(high * r, wide * c)[:m, :n]
    given: dict[str, Any] = {}
    if masked == "mask":
        given["mask"] = torch.as_tensor(blocks)
    elif masked:
        rows = [flags[i][:, seen[i]][: m - i * r].ravel() for i in range(high)]
        begins = torch.tensor([0, *(len(one) for one in rows)]).cumsum(0)
        flat = torch.as_tensor(np.concatenate(rows))
        given["packed_mask"] = flashinfer.segment_packbits(flat, begins, "little")[0]
    q, (k, v) = torch.randn(m, 4, 32), torch.randn(2, n, 2, 32)
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    lists = torch.as_tensor(indptr), torch.as_tensor(indices)
    wrapper.plan(
        *lists, m, n, r, c, 4, 2, 32, logits_soft_cap=4.0, o_data_type="float32", **given, **F32
    )  # fmt: skip
    assert_close(wrapper.run(q, k, v, return_lse=True), attend(q, k, v, Asked(mask=mask, cap=4.0)))


def test_blocks_that_are_refused() -> None:
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    lists = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    q, (k, v) = torch.randn(2, 4, 32), torch.randn(2, 6, 2, 32)
    wrapper.plan(*lists, 2, 6, 2, 3, 4, 2, 32, **F32)
    assert wrapper.run(q, k, v).dtype == torch.float16  # the default there, whatever q is
    for more in ({"causal": True}, {"pos_encoding_mode": "ALIBI"}):
        with pytest.raises(UnsupportedByEngine, match="not the matrix's columns"):
            wrapper.plan(*lists, 2, 6, 2, 3, 4, 2, 32, **more, **F32)
    with pytest.raises(WrongShape, match=r"expected \(1, 2, 3\)"):
        wrapper.plan(*lists, 2, 6, 2, 3, 4, 2, 32, torch.ones(2, 2, 3), **F32)
    with pytest.raises(ArgumentError, match="packed_mask: has 2 bytes; expected 1"):
        bits = torch.ones(2, dtype=torch.uint8)
        wrapper.plan(*lists, 2, 6, 2, 3, 4, 2, 32, packed_mask=bits, **F32)
