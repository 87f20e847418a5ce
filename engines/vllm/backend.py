"""The back end as vLLM asks for it: names, what it serves, and where its parts are."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.vllm.builder import StepBuilder
from warploom.engines.vllm.impl import LayerAttention
from warploom.engines.vllm.layers import CACHE_TYPES


class WarploomBackend(AttentionBackend):
    """For NVIDIA GPUs, chosen with `--attention-backend CUSTOM`.

    vLLM asks the methods here before it loads a model, and names what they deny.
    """

    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_TYPES)

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that it is registered as."""
        return str(AttentionBackendEnum.CUSTOM.name)

    @staticmethod
    def get_impl_cls() -> type[LayerAttention]:
        return LayerAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 8 <= head_size <= 256 and head_size % 8 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Steps with prompts are planned on the host, from its lengths."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= (8, 0))


class CpuBackend(WarploomBackend):
    """For CPUs, in the place of vLLM's own."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return str(AttentionBackendEnum.CPU_ATTN.name)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The one that vLLM's CPU worker moves blocks in."""
        return (KVCacheLayout.LBHNC,)


class NoLatentAttention(AttentionBackend):
    """In the place of vLLM's back ends for latent attention on a CPU: a clear no."""

    @staticmethod
    def get_name() -> str:
        return str(AttentionBackendEnum.CPU_MLA.name)

    @staticmethod
    def get_impl_cls() -> NoReturn:
        raise UnsupportedByEngine(
            what="multi-head latent attention (MLA)",
            engine="vLLM",
            reason="warploom has no kernel for it",
            remedy="Serve this model with vLLM's own: take warploom out of VLLM_PLUGINS.",
        )

    get_builder_cls = get_impl_cls

    @classmethod
    def is_mla(cls) -> bool:
        return True
