"""FlashInfer's modules, and the plan of decodes that engines put in the place of a wrapper's."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from support.flashinfer_reference import Asked, Batch, assert_close

import warploom as wl
from warploom import prefetch
from warploom.engines import flashinfer as calls
from warploom.errors import ArgumentError, FrozenByGraph, WrongShape

flashinfer: Any = calls
ROOM = "warploom.engines.flashinfer"
WORKSPACE = torch.empty(1, dtype=torch.uint8)
F32 = {"q_data_type": "float32"}

# what FlashInfer 0.6.18 has there, of what is served here
MODULES = {
    "attention": ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"],
    "cascade": [
        "MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"
    ],
    "decode": [
        "BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan", "get_seq_lens", "single_decode_with_kv_cache",
    ],
    "page": ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"],
    "pod": ["BatchPODWithPagedKVCacheWrapper"],
    "prefill": [
        "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
        "get_seq_lens", "packbits", "segment_packbits", "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ],
    "quantization": ["packbits", "segment_packbits"],
    "sparse": ["BlockSparseAttentionWrapper", "convert_bsr_mask_layout"],
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_names_that_they_have_there(name: str) -> None:
    module = import_module(f"{ROOM}.{name}")
    assert module is getattr(flashinfer, name)
    assert sorted(module.__all__) == MODULES[name]
    for one in MODULES[name]:
        assert getattr(module, one) is getattr(flashinfer, one, getattr(module, one))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rope", r"has no attribute 'rope'\..* keep FlashInfer's.* modules attention, cascade"),
        ("merge_statse", "Did you mean 'merge_state"),
        ("decode.merge_state", r"It is in warploom\.engines\.flashinfer\."),
        ("convert_bsr_mask_layout", r"in warploom\.engines\.flashinfer\.sparse\."),
        ("decode.xqa", r"There are BatchDecode.*, fast_decode_plan, get_seq_lens"),
        ("prefill.packbit", "Did you mean 'packbits'"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=told):
        attrgetter(name)(flashinfer)
    home, _, last = name.rpartition(".")
    assert not hasattr(getattr(flashinfer, home) if home else flashinfer, last)


def test_modules_without_attention_are_not_found() -> None:
    for line in ("import {}.rope", "from {}.mla import BatchMLAPagedAttentionWrapper"):
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'warploom\.engines\."):
            exec(line.format(ROOM))


def patched(wrapper: Any) -> Any:
    """As SGLang does it."""
    wrapper.plan = wrapper.begin_forward = partial(flashinfer.fast_decode_plan, wrapper)
    return wrapper


@pytest.mark.parametrize("page_size", [1, 4])
def test_decodes_are_planned_from_an_indptr_of_the_host(page_size: int) -> None:
    batch, asked = Batch.of([(1, 9), (1, 0), (1, 5)], page_size=page_size), Asked(window=3, cap=2.0)
    wrapper = patched(flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE))
    lies = torch.full_like(batch.indptr, -7)  # neither is looked at
    last = torch.full_like(batch.last_page_len, -7) if page_size == 1 else batch.last_page_len
    wrapper.begin_forward(
        lies, batch.indices, last, 4, 2, 32, page_size, "NONE", 3, 2.0, None,
        data_type="float32", non_blocking=True, global_override_indptr_cpu=batch.indptr,
    )  # fmt: skip
    got = wrapper.run(batch.q, batch.cache, return_lse=True)
    assert_close(got, batch.expected(asked))
    wrapper.begin_forward(batch.indptr, batch.indices, batch.last_page_len, 4, 2, 32, page_size,
        **F32)  # fmt: skip
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(Asked()))


def test_a_fast_plan_keeps_the_type_of_outputs_and_the_declaration_of_a_graph() -> None:
    first, second = Batch.of([(1, 9), (1, 14)]), Batch.of([(1, 3), (1, 23)], seed=1)
    indptr, indices, last = (torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, indptr, indices, last
    )
    assert wrapper._paged_kv_indices_buf is indices  # which SGLang writes to
    types = {"q_data_type": "float32", "kv_data_type": "float32"}
    lists = first.indptr, first.indices, first.last_page_len
    wrapper.plan(*lists, 4, 2, 32, 4, o_data_type="float16", **types)
    wrapper.run(first.q, first.cache)
    lists = second.indptr, second.indices, second.last_page_len
    patched(wrapper).plan(*lists, 4, 2, 32, 4, **types, global_override_indptr_cpu=second.indptr)
    out, lse = wrapper.run(second.q, second.cache, return_lse=True)
    assert out.dtype == torch.float16
    assert_close((out, lse), second.expected(Asked()), 2e-3)
    with pytest.raises(FrozenByGraph, match="window_left"):
        wrapper.plan(*lists, 4, 2, 32, 4, window_left=3, **types)


def test_a_fast_plan_is_of_decodes() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(ArgumentError, match=r"self: is BatchPrefill.*; expected a BatchDecode"):
        flashinfer.fast_decode_plan(wrapper, [0, 1], [0], [1], 4, 2, 32, 4)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(decode, [0, 1], [0], [1], 4, 2, 32, 4)
    assert decode.run(torch.zeros(1, 4, 32).half(), torch.zeros(1, 2, 4, 2, 32).half()).shape


def test_what_asks_wrappers_is_shown_the_one_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_TRACE", "1")
    batch = Batch.of([(1, 9), (1, 5)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    lists = batch.indptr, batch.indices, batch.last_page_len
    wrapper.plan(*lists, 4, 2, 32, 4, **F32)
    with pytest.raises(ArgumentError, match=r"\.wrapper is None, as before a run"):
        wl.trace(wrapper)
    with pytest.raises(AttributeError, match=r"It is \.wrapper\.explain, .*: None before a run$"):
        wrapper.explain()
    wrapper.run(batch.q, batch.cache)
    assert len(wl.trace(wrapper).items) == len(wl.trace(wrapper.wrapper).items) > 0
    assert wrapper.wrapper.explain().facts
    keys = batch.cache[0]
    told = r"\.wrapper\.prefetch, .*: that of the last run$"
    with (
        pytest.raises(AttributeError, match=told),
        prefetch.beside_pages(wrapper, keys, 1 << 20),
    ):
        pass
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        wrapper.colour  # noqa: B018


def test_workspaces_need_no_bytes_and_stay_on_their_device() -> None:
    batch = Batch.of([(1, 9), (1, 5)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    lists = batch.indptr, batch.indices, batch.last_page_len
    sizes = wrapper.workspace_size(*lists, 4, 2, 32, 4, q_len_per_req=1, **F32)
    assert sizes == (0, 0)
    wrapper.reset_workspace_buffer(*(torch.empty(n, dtype=torch.uint8) for n in sizes))
    wrapper.plan(*lists, 4, 2, 32, 4, **F32)
    assert_close(wrapper.run(batch.q, batch.cache, return_lse=True), batch.expected(Asked()))
    levels = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    for one in (wrapper, levels):
        with pytest.raises(ArgumentError, match="is on meta, and the wrapper attends on cpu"):
            one.reset_workspace_buffer(WORKSPACE.to("meta"), [WORKSPACE])
        with pytest.raises(ArgumentError, match="float_workspace_buffer: is None"):
            one.reset_workspace_buffer(None)


def test_a_device_without_a_number_is_any_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ROOM}.facade.workspace_device", lambda _: torch.device("cuda:1"))
    flashinfer.BatchAttention(device="cuda").reset_workspace_buffer(WORKSPACE)
    with pytest.raises(ArgumentError, match="is on cuda:1, and the wrapper attends on cuda:0"):
        flashinfer.BatchAttention(device="cuda:0").reset_workspace_buffer(WORKSPACE)


def test_flags_of_blocks_row_by_row() -> None:
    """A packed mask of them says what the mask of blocks says."""
    rng = torch.Generator().manual_seed(0)
    indptr, indices = torch.tensor([0, 2, 3]).int(), torch.tensor([0, 2, 1]).int()
    mask = torch.rand(3, 4, 8, generator=rng) < 0.6
    flat = flashinfer.sparse.convert_bsr_mask_layout(mask, indptr)
    by_hand = [mask[block, row] for blocks in ([0, 1], [2]) for row in range(4) for block in blocks]
    np.testing.assert_array_equal(flat, torch.cat(by_hand))
    bits, _ = flashinfer.segment_packbits(flat, indptr * 32, "little")
    q, (k, v) = torch.randn(8, 2, 32), torch.randn(2, 24, 2, 32)
    outs = []
    for given in ({"mask": mask}, {"packed_mask": bits}):
        wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
        wrapper.plan(indptr, indices, 8, 24, 4, 8, 2, 2, 32, o_data_type=None, **given, **F32)
        outs.append(wrapper.run(q, k, v))
    assert torch.equal(*outs)
    with pytest.raises(WrongShape, match=r"mask has shape \(2, 4, 8\); expected \[3, R, C\]"):
        flashinfer.sparse.convert_bsr_mask_layout(mask[:2], indptr)
