"""What vLLM's CUDA side takes, as far as a CPU can show it: bounds, lists by device, calls."""

# pyright: reportMissingImports=false
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from support.tiny_models import prompts
from support.vllm_tokens import SMALL
from vllm import LLM, SamplingParams, _custom_ops
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

from warploom.engines import vllm as plugin
from warploom.engines.vllm import builder, kinds
from warploom.engines.vllm.backend import WarploomBackend
from warploom.engines.vllm.impl import LayerAttention

Saved = Callable[..., Path]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Begin and end with vLLM's own back ends."""
    forget()
    yield
    forget()


def forget() -> None:
    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        AttentionBackendEnum[name].clear_override()
    _cached_get_attn_backend.cache_clear()


def answers(model: Path) -> list[list[int]]:
    llm = LLM(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        dtype="float32", **SMALL,
    )  # fmt: skip
    how = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": one} for one in prompts()]
    return [list(x.outputs[0].token_ids) for x in llm.generate(asked, how, use_tqdm=False)]


def test_decodes_by_bounds_answer_as_vllm(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers and lists of full graphs; the host makes their plans, since there is no device."""
    expected = answers(saved("Gemma2"))
    forget()
    plugin.register()
    taken = []
    chosen = kinds.Kind._wrapper

    def wrapper(kind: Any, step: Any) -> Any:
        found = chosen(kind, step)
        taken.append((found is kind._decode, step.longest_q))
        return found

    monkeypatch.setattr(kinds.Kind, "_wrapper", wrapper)
    monkeypatch.setattr(
        builder,
        "_decode_bounds",
        lambda config, page, device: builder._largest_decodes(config, page),
    )
    assert answers(saved("Gemma2")) == expected
    assert {longest for decodes, longest in taken if decodes} == {1}
    assert sum(decodes for decodes, _ in taken) > 5
    assert not all(decodes for decodes, _ in taken)


@pytest.mark.parametrize(
    ("mode", "device", "bounded"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, CUDA, True),
        (CUDAGraphMode.FULL_DECODE_ONLY, CUDA, True),
        (CUDAGraphMode.FULL, CUDA, True),
        (CUDAGraphMode.PIECEWISE, CUDA, False),
        (CUDAGraphMode.NONE, CUDA, False),
        (CUDAGraphMode.FULL, torch.device("cpu"), False),
    ],
)
def test_bounds_are_declared_where_decodes_have_full_graphs(
    mode: CUDAGraphMode, device: torch.device, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "max_decode_query_len", lambda config: 4)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=100),
    )
    found = builder._decode_bounds(config, 16, device)
    assert (found is not None) == bounded
    if found is not None:
        numbers = found.max_requests, found.max_q_rows, found.max_kv_len, found.max_blocks
        assert numbers == (8, 32, 100, 8 * 7 + 1)


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
def test_new_tokens_are_written_by_vllms_kernel(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the cache as [pages, page, heads, lanes], the scales as tensors."""
    as_called = inspect.signature(_custom_ops.reshape_and_cache_flash)
    calls: list[dict[str, Any]] = []

    def called(*args: Any) -> None:
        calls.append(as_called.bind(*args).arguments)

    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", called)
    impl = LayerAttention(4, 32, 0.2, 2, kv_cache_dtype=stored)
    dtype = torch.bfloat16 if stored == "auto" else torch.uint8
    with torch.device("meta"):  # tensors that are not the host's
        cache = torch.empty(10, 2, 16, 64, dtype=dtype)
        new = torch.empty(5, 2, 32, dtype=torch.bfloat16)
        slots = torch.empty(5, dtype=torch.int64)
    scale = torch.tensor(2.0)
    impl.do_kv_cache_update(SimpleNamespace(_k_scale=scale, _v_scale=scale), new, new, cache, slots)
    (given,) = calls
    for name in ("key_cache", "value_cache"):
        assert given[name].shape == (10, 16, 2, 32)
        assert given[name].stride() == (2 * 16 * 64, 64, 16 * 64, 1)
    assert given["value_cache"].storage_offset() == 32
    assert given["slot_mapping"] is slots
    assert given["kv_cache_dtype"] == stored


def test_the_selector_names_what_is_denied() -> None:
    """As vLLM asks on CUDA before it loads a model."""
    asked: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": (9, 0), "attn_type": "decoder",
        "has_sliding_window": True,
    }  # fmt: skip
    assert WarploomBackend.validate_configuration(**asked) == []
    for change, reason in (
        ({"head_size": 100}, "head_size"),
        ({"use_mla": True}, "MLA"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"device_capability": (7, 5)}, "compute capability"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_non_causal": True}, "non-causal"),
    ):
        found = WarploomBackend.validate_configuration(**{**asked, **change})
        assert any(reason in one for one in found), (change, found)
