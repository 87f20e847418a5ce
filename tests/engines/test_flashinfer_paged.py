"""FlashInfer's calls over pages, beside attention in NumPy float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flashinfer_reference import Asked, Batch, assert_close

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines import flashinfer as calls
from warploom.errors import (
    ArgumentError,
    BadLength,
    BoundsExceeded,
    FrozenByGraph,
    NotPlanned,
    PlanMismatch,
    WrongShape,
)

flashinfer: Any = calls  # whose callers unpack lists of tables
WORKSPACE = torch.empty(1, dtype=torch.uint8)
F32 = {"q_data_type": "float32"}
FEW = settings(max_examples=25, deadline=None)

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 23)), min_size=1, max_size=4)
DECODES = st.lists(st.integers(0, 23), min_size=1, max_size=4)
SHAPES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4]),
        "layout": st.sampled_from(["NHD", "HND"]),
        "heads": st.sampled_from([(4, 2), (3, 1)]),
        "seed": st.integers(0, 99),
    }
)
NUMBERS = st.fixed_dictionaries(
    {
        "window": st.integers(0, 9),
        "cap": st.floats(1, 9),
        "rope_scale": st.floats(1, 4),
        "rope_theta": st.sampled_from([1e4, 5e5]),
        "sm_scale": st.sampled_from([None, 0.3]),
    }
)
# which of the numbers hold, as each set is a kernel
KINDS = st.sampled_from(
    [
        {"window": -1, "cap": 0.0},
        {"encoding": "ROPE_LLAMA", "cap": 0.0},
        {"encoding": "ALIBI", "window": -1},
    ]
)


def asking(numbers: dict[str, Any], kind: dict[str, Any]) -> Asked:
    return Asked(**{**numbers, **kind})


def sizes(batch: Batch) -> tuple[int, int, int]:
    return batch.q.shape[1], batch.values[0].shape[1], batch.q.shape[2]


def page_of(batch: Batch, layout: str) -> int:
    return batch.cache[0].shape[1 if layout == "NHD" else 2]


def prefill_of(batch: Batch, asked: Asked, layout: str = "NHD", **more: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(
        batch.qo_indptr, batch.indptr, batch.indices, batch.last_page_len, *sizes(batch),
        page_of(batch, layout), causal=asked.causal, **asked.planned, **F32, **more,
    )  # fmt: skip
    return wrapper


def decode_of(batch: Batch, asked: Asked, layout: str = "NHD", **more: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(
        batch.indptr, batch.indices, batch.last_page_len, *sizes(batch), page_of(batch, layout),
        **asked.planned, **F32, **more,
    )  # fmt: skip
    return wrapper


@FEW
@given(LENGTHS, SHAPES, NUMBERS, KINDS, st.booleans())
def test_prefills(
    lengths: list[tuple[int, int]], shape: Any, numbers: Any, kind: Any, causal: bool
) -> None:
    batch, asked = Batch.of(lengths, **shape), replace(asking(numbers, kind), causal=causal)
    wrapper = prefill_of(batch, asked, shape["layout"])
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(asked))


@FEW
@given(DECODES, SHAPES, NUMBERS, KINDS)
def test_decodes(keys: list[int], shape: Any, numbers: Any, kind: Any) -> None:
    batch, asked = Batch.of([(1, n) for n in keys], **shape), asking(numbers, kind)
    wrapper = decode_of(batch, asked, shape["layout"])
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(asked))


@FEW
@given(LENGTHS, st.integers(0, 99), st.sampled_from([-1, 5]), st.booleans())
def test_a_mask_takes_the_place_of_causality(
    lengths: list[tuple[int, int]], seed: int, window: int, is_packed: bool
) -> None:
    batch = Batch.of(lengths, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    masks = [torch.rand(one, generator=rng) < 0.7 for one in lengths]
    flat = torch.cat([one.flatten() for one in masks])
    begins = torch.tensor([0, *(one.numel() for one in masks)]).cumsum(0)
    packed, _ = flashinfer.segment_packbits(flat, begins, bitorder="little")
    given: dict[str, Any] = {"packed_custom_mask": packed} if is_packed else {"custom_mask": flat}
    asked = Asked(causal=True, window=window)
    wrapper = prefill_of(batch, asked, **given)
    each = [replace(asked, mask=one) for one in masks]
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(each))


@FEW
@given(
    LENGTHS, st.floats(0.2, 3), st.floats(0.2, 3), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_scales_and_sinks_come_with_runs(
    lengths: list[tuple[int, int]], scale: float, v_scale: float, with_sinks: bool, seed: int
) -> None:
    batch = Batch.of(lengths, seed=seed)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    asked = Asked(causal=True)
    wrapper = prefill_of(batch, asked)
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(asked))
    got = wrapper.run_return_lse(
        batch.q, batch.cache, q_scale=scale, k_scale=torch.tensor([0.5]), v_scale=v_scale,
        sinks=sinks,
    )  # fmt: skip
    scaled = replace(asked, factor=scale * 0.5, v_scale=v_scale, sinks=sinks)
    assert_close(got, batch.expected(scaled))
    assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(asked))


def test_one_kernel_for_all_numbers() -> None:
    batch = Batch.of([(2, 9), (1, 4)])
    wrapper = prefill_of(batch, Asked(window=3, cap=2.0))
    wrapper.run(batch.q, batch.cache)
    for window, cap in ((5, 2.0), (0, 4.0)):
        asked = Asked(window=window, cap=cap)
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.last_page_len, *sizes(batch), 4,
            **asked.planned, **F32,
        )  # fmt: skip
        assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(asked))
    assert len(wrapper._made) == 1


def test_narrow_caches() -> None:
    batch = Batch.of([(1, 9), (1, 4)], kv_dtype=torch.float8_e4m3fn)
    wrapper = decode_of(batch, Asked(), kv_data_type=torch.float8_e4m3fn)
    got = wrapper.run_return_lse(batch.q, batch.cache, k_scale=0.5, v_scale=2.0)
    assert_close(got, batch.expected(Asked(factor=0.5, v_scale=2.0)), 1e-3)


def test_lists_may_begin_within_longer_ones() -> None:
    batch = Batch.of([(1, 9), (2, 4), (1, 0)])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    last = batch.last_page_len.clone()
    last[2] = 4  # of no page
    wrapper.plan(
        batch.qo_indptr[1:] - 1, batch.indptr[1:], batch.indices, last[1:], *sizes(batch), 4, **F32
    )
    out, lse = batch.expected(Asked())
    assert_close(wrapper.run_return_lse(batch.q[1:], batch.cache), (out[1:], lse[1:]))


def test_rows_of_a_decode_see_each_other_causally() -> None:
    batch = Batch.of([(3, 9), (3, 4)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    wrapper.plan(
        batch.indptr, batch.indices, batch.last_page_len, *sizes(batch), 4, q_len_per_req=3, **F32
    )
    got = wrapper.run(batch.q, batch.cache, return_lse=True)
    assert_close(got, batch.expected(Asked(causal=True)))
    with pytest.raises(PlanMismatch, match="q_len_per_req"):
        wrapper.run(batch.q, batch.cache, q_len_per_req=2)
    with pytest.raises(WrongShape, match=r"expected \[6, heads, dim\]: 3 for each of 2"):
        wrapper.run(batch.q[:4], batch.cache)


def test_the_older_way_is_told_at_each_run() -> None:
    batch = Batch.of([(3, 9), (2, 4)])
    wrapper = prefill_of(batch, Asked())
    got = wrapper.forward_return_lse(batch.q, batch.cache, causal=True, window_left=2)
    assert_close(got, batch.expected(Asked(causal=True, window=2)))
    decodes = Batch.of([(1, 9), (1, 4)])
    decode = decode_of(decodes, Asked())
    got = decode.forward_return_lse(decodes.q, decodes.cache, logits_soft_cap=2.0, sm_scale=0.5)
    assert_close(got, decodes.expected(Asked(cap=2.0, sm_scale=0.5)))


def test_results_are_written_where_the_caller_says() -> None:
    batch = Batch.of([(3, 9)])
    wrapper = prefill_of(batch, Asked(), o_data_type="float16")
    out, lse = torch.zeros_like(batch.q).half(), torch.zeros(3, 4)
    got = wrapper.run(batch.q, torch.stack(batch.cache, 1), out=out, lse=lse, return_lse=True)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    assert_close((out, lse), batch.expected(Asked()), 2e-3)
    with pytest.raises(ArgumentError, match="out"):
        wrapper.run(batch.q, batch.cache, out=torch.zeros_like(batch.q))


def test_batches_within_the_buffers_of_a_graph() -> None:
    first, second = Batch.of([(1, 9), (1, 14)]), Batch.of([(1, 3), (1, 23)], seed=1)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    for batch in (first, second):
        lists = batch.indptr, batch.indices, batch.last_page_len
        wrapper.plan(*lists, 4, 2, 32, 4, logits_soft_cap=2.0, **F32)
        for scale in (1.0, 0.5):
            got = wrapper.run_return_lse(batch.q, batch.cache, k_scale=scale)
            assert_close(got, batch.expected(Asked(cap=2.0, factor=scale)))
    assert len(wrapper._ready) == 2  # replays of either run find this batch
    assert not any(buffer.any() for buffer in buffers)
    with pytest.raises(FrozenByGraph, match="sm_scale"):
        wrapper.plan(*lists, 4, 2, 32, 4, logits_soft_cap=2.0, sm_scale=1.0, **F32)
    with pytest.raises(FrozenByGraph, match="logits_soft_cap is 3"):
        wrapper.plan(*lists, 4, 2, 32, 4, logits_soft_cap=3.0, **F32)
    with pytest.raises(PlanMismatch, match="number of requests is 1"):
        wrapper.plan(lists[0][:2], lists[1], lists[2][:1], 4, 2, 32, 4, logits_soft_cap=2.0, **F32)
    long = Batch.of([(1, 30), (1, 23)])
    with pytest.raises(BoundsExceeded):
        lists = long.indptr, long.indices, long.last_page_len
        wrapper.plan(*lists, 4, 2, 32, 4, logits_soft_cap=2.0, **F32)
    with pytest.raises(NotPlanned):
        wrapper.run(long.q, long.cache)


def test_masks_within_the_buffers_of_a_graph() -> None:
    sizes_of = {"qo_indptr_buf": 3, "paged_kv_indptr_buf": 3, "paged_kv_indices_buf": 8}
    sizes_of |= {"paged_kv_last_page_len_buf": 2, "custom_mask_buf": 20, "mask_indptr_buf": 3}
    buffers = {name: torch.zeros(n, dtype=torch.int32) for name, n in sizes_of.items()}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, **buffers
    )
    for lengths in ([(4, 9), (3, 14)], [(1, 3), (5, 9)]):
        batch = Batch.of(lengths)
        masks = [torch.rand(one) < 0.7 for one in lengths]
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.last_page_len, 4, 2, 32, 4,
            custom_mask=torch.cat([one.flatten() for one in masks]), **F32,
        )  # fmt: skip
        each = [Asked(mask=one) for one in masks]
        assert_close(wrapper.run_return_lse(batch.q, batch.cache), batch.expected(each))


def test_what_is_refused_says_so() -> None:
    batch = Batch.of([(1, 9)])
    wrapper = decode_of(batch, Asked(window=3))
    lists = batch.indptr, batch.indices, batch.last_page_len
    with pytest.raises(ArgumentError, match="window_left: is 4, but plan"):
        wrapper.run(batch.q, batch.cache, window_left=4)
    with pytest.raises(UnsupportedByEngine, match=r"kv_cache_sf in FlashInfer's calls"):
        wrapper.run(batch.q, batch.cache, kv_cache_sf=batch.q)
    with pytest.raises(UnsupportedByEngine, match="k_scale of shape"):
        wrapper.run(batch.q, batch.cache, k_scale=torch.ones(2))
    with pytest.raises(UnsupportedByEngine, match=r"warploom\.Variant"):
        wrapper.run(batch.q, batch.cache, 1.0)
    with pytest.raises(UnsupportedByEngine, match=r"warploom\.Variant"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=["name"])
    with pytest.raises(UnsupportedByEngine, match="backend='cudnn'"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend="cudnn")
    with pytest.raises(ArgumentError, match="kv_layout: is 'NDH'"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NDH")
    with pytest.raises(ArgumentError, match="paged_kv_indices_buffer: is needed"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True,
            paged_kv_indptr_buffer=[0, 0], paged_kv_last_page_len_buffer=[0])  # fmt: skip
    for types, said in (
        ({"q_data_type": torch.float8_e4m3fn}, "queries of type"),
        ({"q_data_type": "float16", "kv_data_type": "bfloat16"}, "keys of type"),
        ({"q_data_type": "float16", "kv_data_type": torch.uint8}, "4-bit"),
        ({"q_data_type": "float16", "o_data_type": "float8_e4m3fn"}, "outputs of type"),
    ):
        with pytest.raises(UnsupportedByEngine, match=said):
            wrapper.plan(*lists, 4, 2, 32, 4, **types)
    with pytest.raises(ArgumentError, match="q_data_type: is 'float7'"):
        wrapper.plan(*lists, 4, 2, 32, 4, q_data_type="float7")
    with pytest.raises(ArgumentError, match="pos_encoding_mode: is 'ROPE'"):
        wrapper.plan(*lists, 4, 2, 32, 4, pos_encoding_mode="ROPE", **F32)
    with pytest.raises(BadLength, match=r"seq_lens\[0\] is 8; expected 9"):
        wrapper.plan(*lists, 4, 2, 32, 4, seq_lens=torch.tensor([8]), **F32)
    with pytest.raises(ArgumentError, match="custom_mask: has 8 flags; the batch has 9"):
        prefill_of(batch, Asked(), custom_mask=torch.ones(8, dtype=torch.bool))
    with pytest.raises(AttributeError, match="MLA is not there yet"):
        flashinfer.BatchMLAPagedAttentionWrapper  # noqa: B018
