"""Once per step and KV-cache group: what vLLM scheduled, planned for all layers of the group."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.vllm.kinds import Kind, kinds_of
from warploom.engines.vllm.steps import Step
from warploom.scheduler.model.bounds import Bounds

_log = init_logger("vllm.warploom")  # where people look for what vLLM does
_ELSE = "Serve without it, or with vLLM's own attention: take warploom out of VLLM_PLUGINS."


@dataclass(eq=False)
class StepMetadata:
    """What layers are given for a step.

    Attributes:
        step: the batch.
        kinds: who attends, by the layer's name.
        num_actual_tokens: query rows; vLLM's name, which it reads.
    """

    step: Step
    kinds: Mapping[str, Kind]
    num_actual_tokens: int


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Plans the steps of one KV-cache group; vLLM makes it when the model is loaded.

    Full CUDA graphs hold the runs of decodes, and of the rows that speculation adds to them. Steps
    with prefills run piecewise: attention lies between the graphs.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # what a device must plan for is bounded by what it may decode
    reorder_batch_threshold: int | None = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Declare the wrappers of the group's layers, and build their kernels.

        Args:
            kv_cache_spec: the group's pages.
            layer_names: its layers.
            vllm_config: all options.
            device: of all tensors.

        Raises:
            UnsupportedByEngine: an option or a model that is not served.
            BadVariantChoice: VLLM_WARPLOOM_VARIANT chooses badly.
            UnsupportedSpec, ArgumentError: no kernel serves a layer.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _refuse(vllm_config)
        self._page_size = int(kv_cache_spec.block_size)
        known = vllm_config.compilation_config.static_forward_context
        model = vllm_config.model_config
        layers = [known[name].impl.described(name, model.hf_text_config) for name in layer_names]
        # the device knows first how many drafts are good, and drafting changes its lengths alone
        self._knows_lengths = not vllm_config.speculative_config
        self._kinds = kinds_of(
            layers,
            page_size=self._page_size,
            dtype=model.dtype,
            device=device,
            decode=_decode_bounds(vllm_config, self._page_size, device),
            prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        )
        for kind in dict.fromkeys(self._kinds.values()):
            kind.warm_up()
        _log.info("warploom attends in %d layers, pages of %d", len(layers), self._page_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StepMetadata:
        """Plan a step, on the current stream.

        Args:
            common_prefix_len: always 0, since vLLM has no cascades; page tables tell of prefixes.
            common_attn_metadata: lengths and pages of the step.
            fast_build: makes no difference.

        Raises:
            UnsupportedByEngine: the step is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise _unsupported("attention that is not causal", "only decoders are connected")
        requests = common.num_reqs
        lens = common.seq_lens[:requests]
        host_kv = None
        if lens.is_cpu:
            host_kv = lens.numpy()
        elif self._knows_lengths and common.seq_lens_cpu_upper_bound is not None:
            host_kv = common.seq_lens_cpu_upper_bound[:requests].numpy()
        step = Step(
            page_size=self._page_size,
            rows=common.num_actual_tokens,
            longest_q=int(common.max_query_len),
            longest_kv=int(common.max_seq_len),
            qo_indptr=common.query_start_loc[: requests + 1],
            kv_lens=lens,
            pages=common.block_table_tensor[:requests],
            # vLLM writes to its own arrays again, and the step may be planned once more
            host_qo=common.query_start_loc_cpu[: requests + 1].numpy().copy(),
            host_kv=None if host_kv is None else host_kv.astype(np.int32),
        )
        for kind in dict.fromkeys(self._kinds.values()):
            kind.plan(step)
        return StepMetadata(step, self._kinds, common.num_actual_tokens)


def _decode_bounds(config: VllmConfig, page_size: int, device: torch.device) -> Bounds | None:
    """The largest batch of decodes in a full CUDA graph; None if vLLM captures none."""
    mode = config.compilation_config.cudagraph_mode
    if device.type != "cuda" or mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return None
    return _largest_decodes(config, page_size)


def _largest_decodes(config: VllmConfig, page_size: int) -> Bounds:
    requests, most = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    rows = requests * max_decode_query_len(config)
    # prefixes may be shared, so that lists are longer than there are pages
    return Bounds(requests, rows, most, requests * -(-most // page_size) + 1)


def _refuse(config: VllmConfig) -> None:
    model, parallel = config.model_config, config.parallel_config
    guesses = config.speculative_config
    wrong = {
        "prefixes that see each other both ways (multimodal prefix LM)": model.is_mm_prefix_lm,
        "reference sliding windows (R-SWA)": model.rswa_window is not None,
        "attention that is not causal": config.attention_config.use_non_causal,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "adaptive verification, whose lengths the device decides": (
            guesses is not None and guesses.enable_adaptive_verification
        ),
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise _unsupported(what, "the back end does not connect it")


def _unsupported(what: str, reason: str) -> UnsupportedByEngine:
    return UnsupportedByEngine(what=what, engine="vLLM", reason=reason, remedy=_ELSE)
