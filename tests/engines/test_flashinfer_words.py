"""Errors of FlashInfer's calls have FlashInfer's names, and what was raised first as cause."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warploom import errors
from warploom.engine_errors import BeyondGraph
from warploom.engines import flashinfer as calls

flashinfer: Any = calls
WORKSPACE = torch.empty(1, dtype=torch.uint8)
F32 = {"q_data_type": "float32"}
HERE = re.compile(
    r"(?<![\w.])(num_q_heads|head_dim_v|kv_dtype|rope_factor|packed_mask|dtype=|Bounds|max_blocks|"
    r"max_q_rows|SoftCap|PackedMask|AttentionWrapper|part)\b"
)
Q, CACHE = torch.zeros(2, 4, 32), torch.zeros(10, 2, 4, 2, 32)
SIZES = 4, 2, 32, 4
LISTS = [0, 3, 5], [7, 2, 4, 0, 9], [4, 2]


def decode(*lists: Any, sizes: Any = SIZES, **named: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*(lists or LISTS), *sizes, **(F32 | named))
    return wrapper


def prefill(*lists: Any, sizes: Any = SIZES, **named: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*(lists or ([0, 1, 2], *LISTS)), *sizes, **(F32 | named))
    return wrapper


def ragged(sizes: Any = SIZES[:3]) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan([0, 1, 2], [0, 3, 5], *sizes, **F32)
    return wrapper


def any_rows(*lists: Any) -> Any:
    wrapper = flashinfer.BatchAttention(device="cpu")
    wrapper.plan(*lists, 4, 2, 32, 32, 4, q_data_type="float32", kv_data_type="float32")
    return wrapper


def pod(*lists: Any) -> Any:
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*lists, *SIZES, **F32)
    return wrapper


def levels(rows: Any, *tables: Any) -> Any:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(rows), WORKSPACE)
    wrapper.plan(rows, *tables, *SIZES, **F32)
    return wrapper


def blocks(*lists: Any, of: Any = (8, 16, 4, 8)) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(*lists, *of, 4, 2, 32, o_data_type=None, **F32)
    return wrapper


def append(key: Any, cache: Any, **changes: Any) -> None:
    given = {"batch_indices": [0, 0, 1], "positions": [0, 1, 0], "kv_indices": [4, 1],
        "kv_indptr": [0, 1, 2], "kv_last_page_len": [2, 1]} | changes  # fmt: skip
    lists = {name: torch.as_tensor(x) for name, x in given.items()}
    flashinfer.append_paged_kv_cache(key, key, paged_kv_cache=cache, **lists)


KEY = torch.zeros(3, 2, 32)
CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: decode(sizes=(4, 3, 32, 4)), errors.ArgumentError, "^num_qo_heads: 4 is no positive"),
    (lambda: decode(sizes=(4, 2, 0, 4)), errors.ArgumentError, "^head_dim: is 0"),
    (lambda: prefill(sizes=(4, 2, 0, 4)), errors.ArgumentError, "^head_dim_qk: is 0"),
    (lambda: prefill(sizes=(4, 2, 30, 4)), errors.BadHeadDim, "^head_dim_qk=30 is not supported"),
    (lambda: ragged((4, 2, 32, 30)), errors.BadHeadDim, "^head_dim_vo=30 is not supported"),
    (lambda: decode(sizes=(4, 2, 32, "a")), errors.ArgumentError, "^page_size: is 'a'"),
    (lambda: decode(logits_soft_cap=float("nan")), errors.ArgumentError, "^logits_soft_cap: is n"),
    (lambda: decode(window_left=2**31), errors.ArgumentError, "^window_left: 2147483648"),
    (
        lambda: decode(pos_encoding_mode="ROPE_LLAMA", rope_scale=0.0),
        errors.ArgumentError, "^rope_scale: 0.0 is not above 0",
    ),
    (lambda: decode(q_data_type="int32"), errors.UnsupportedSpec, "^q_data_type torch.int32"),
    (
        lambda: decode(kv_data_type=torch.bool), errors.UnsupportedSpec,
        "^kv_data_type torch.bool with q_data_type float32",
    ),
    (lambda: decode([0, 3, 2], *LISTS[1:]), errors.BadIndptr, "^indptr decreases at index 2"),
    (lambda: decode([0, 3, 5, 5], *LISTS[1:]), errors.UnequalRequests, "^indptr has 4 entries"),
    (lambda: decode([[0, 3, 5]], *LISTS[1:]), errors.WrongShape, r"^indptr has shape \(1, 3\)"),
    (lambda: decode(LISTS[0], [1], [4, 2]), errors.WrongShape, r"^indices .* is indptr\[-1\];"),
    (
        lambda: prefill([0, 1, 2], [0, 3, 1], *LISTS[1:]), errors.BadIndptr,
        "^paged_kv_indptr decreases",
    ),
    (
        lambda: prefill([0, 1, 2], *LISTS[:2], [5, 2]), errors.BadLength,
        r"^paged_kv_last_page_len\[0\] is 5",
    ),
    (
        lambda: prefill([0, 1], *LISTS), errors.UnequalRequests,
        "^qo_indptr .*; paged_kv_indptr has 3, of 2, paged_kv_last_page_len has 2",
    ),
    (
        lambda: prefill(packed_custom_mask=torch.zeros(3)), errors.WrongDType,
        "^packed_custom_mask has dtype torch.float32",
    ),
    (
        lambda: any_rows([0, 1], [0, 3, 5], [7, 2, 4, 0, 9], [11, 6]), errors.UnequalRequests,
        "kv_len_arr has 2",
    ),
    (
        lambda: pod([0, 1], [0, 3], [0, 1], [4], [0, 1], [0, 1], [2], [4]), errors.WrongShape,
        r"^kv_indices_p has shape \(2,\).* kv_indptr_p\[-1\]",
    ),
    (
        lambda: pod([0, 1], [0, 3], [0, 1, 2], [4], [0, 1], [0, 1], [2], [5]), errors.BadLength,
        r"^last_page_len_d\[0\] is 5",
    ),
    (
        lambda: levels([[0, 2], [0, 1, 2]], [[0, 2], [0, 1, 2]], [[0, 1], [2, 3]], [[3], [1, 1]]),
        errors.ArgumentError, "^paged_kv_last_page_len: request 0 .* of a level, and another level",
    ),
    (
        lambda: levels([[0, 2], [0, 1, 2]], [[0, 2], [0, 1, 2]], [[0, 1], [2, 3]], [[4], [1, 5]]),
        errors.BadLength, r"^paged_kv_last_page_len\[1\]\[1\] is 5",
    ),
    (lambda: blocks([0, 1, 3], [0, 1, 2]), errors.IndexOutOfRange, r"^indices\[2\] is 2"),
    (lambda: blocks([0, 1, 0], [0, 1]), errors.BadIndptr, "^indptr decreases"),
    (lambda: blocks([0, 1], [0], of=(8, 16, 0, 8)), errors.ArgumentError, "^R: is 0"),
    (lambda: blocks([0, 1], [0], of=(8, -1, 4, 8)), errors.ArgumentError, "^N: is -1"),
    (
        lambda: blocks([0, 1, 1], [0]).run(Q, CACHE[0, 0], CACHE[0, 0]), errors.WrongShape,
        "^q has shape .*; 8 is M of the plan",
    ),
    (
        lambda: decode().run(torch.zeros(3, 4, 32), CACHE), errors.WrongShape,
        r"^q has shape .* expected \[2, heads, dim\]: 1 for each of 2 requests",
    ),
    (lambda: decode().run(Q.half(), CACHE), errors.WrongDType, "declare q_data_type=torch.float16"),
    (lambda: decode().run(Q, None), errors.ArgumentError, "^paged_kv_cache: is None"),
    (lambda: decode().run(Q, [1, 2]), errors.ArgumentError, "^k: an int is neither"),
    (
        lambda: decode().run(Q, torch.zeros(10, 2, 8, 2, 32)), errors.WrongShape,
        "a page has page_size=4 tokens",
    ),
    (
        lambda: decode().run(Q, CACHE.transpose(2, 3)), errors.WrongShape,
        "; kv_layout='HND' would fit",
    ),
    (lambda: decode().run(Q, CACHE[:5]), errors.IndexOutOfRange, r"^indices\[4\] is 9"),
    (lambda: decode().run(Q, CACHE, sinks=torch.zeros(3)), errors.WrongShape, "^sinks has shape"),
    (lambda: decode().run(Q, CACHE, sinks=[0.0] * 4), errors.ArgumentError, "^sinks: a list is"),
    (lambda: decode().run(Q, CACHE, v_scale="a"), errors.ArgumentError, "^v_scale: is 'a'"),
    (lambda: decode().forward(Q, CACHE, window_left=2**31), errors.ArgumentError, "^window_left"),
    (
        lambda: flashinfer.single_decode_with_kv_cache(Q[0], KEY[..., :8], KEY), errors.WrongShape,
        r"^k has shape \(3, 2, 8\); expected 32 lanes, as q",
    ),
    (
        lambda: flashinfer.single_prefill_with_kv_cache(Q, KEY, KEY[:2]), errors.WrongShape,
        r"^v has shape \(2, 2, 32\); expected \(3, 2\) before",
    ),
    (
        lambda: flashinfer.single_prefill_with_kv_cache(Q, KEY, KEY[..., :30]), errors.BadHeadDim,
        "^head_dim_vo=30",
    ),
    (lambda: append(KEY.double(), CACHE), errors.ArgumentError, "^the type of append_key: is"),
    (lambda: append(KEY[..., :8], CACHE), errors.WrongShape, "^append_key .* lanes=32"),
    (lambda: append(KEY, CACHE[:3]), errors.IndexOutOfRange, r"^kv_indices\[0\] is 4"),
    (lambda: append(KEY, None), errors.ArgumentError, "^paged_kv_cache: is None"),
    (lambda: append(KEY, CACHE[0]), errors.WrongShape, "^paged_kv_cache has shape"),
    (lambda: append(KEY, CACHE, positions=[0.0, 1, 0]), errors.WrongDType, "^positions has dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "told"), CASES)
def test_errors_have_the_names_that_the_caller_gave(
    call: Callable[[], Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told) as caught:
        call()
    assert type(caught.value) is kind and not HERE.search(str(caught.value))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_was_raised_first_is_the_cause() -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        decode(sizes=(4, 3, 32, 4))
    cause = caught.value.__cause__
    assert isinstance(cause, errors.ArgumentError) and cause.facts["name"] == "num_q_heads"
    with pytest.raises(errors.NotPlanned) as same:  # nothing to translate
        flashinfer.BatchAttention(device="cpu").run(Q, CACHE)
    assert same.value.__cause__ is None


def test_graphs_say_which_buffer_is_too_short() -> None:
    def buffers(*sizes: int) -> list[torch.Tensor]:
        return [torch.zeros(n, dtype=torch.int32) for n in sizes]

    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(3, 4, 2))
    with pytest.raises(BeyondGraph, match=r"5 pages .* 4, .* length of paged_kv_indices_buffer"):
        wrapper.plan(*LISTS, *SIZES, **F32)
    with pytest.raises(errors.ArgumentError, match="paged_kv_indptr_buffer: has room for no"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(1, 0, 0))
    masks = {"custom_mask_buf": torch.zeros(2), "mask_indptr_buf": torch.zeros(3)}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", True, *buffers(3, 3, 5, 2), **masks
    )
    with pytest.raises(BeyondGraph, match=r"3 bytes of masks .* 2, .* length of custom_mask_buf"):
        wrapper.plan([0, 1, 2], *LISTS, *SIZES, custom_mask=torch.ones(18), **F32)
    wrapper.plan([0, 1, 2], *LISTS, *SIZES, **F32)
    wrapper.run(Q, CACHE)
    with pytest.raises(BeyondGraph, match=r"3 rows .* hold: 2, which is what the first plan had"):
        wrapper.plan([0, 1, 3], *LISTS, *SIZES, **F32)
