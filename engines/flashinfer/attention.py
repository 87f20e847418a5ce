"""`BatchAttention`, and the paged wrapper whose runs are given sinks by position."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, ClassVar

import torch

from warploom.engines.flashinfer.declared import Declaration, Types, paged_format
from warploom.engines.flashinfer.facade import Facade, RunScales, Step, takes_a_new_batch
from warploom.engines.flashinfer.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from warploom.engines.flashinfer.refusals import refuse_given
from warploom.engines.flashinfer.tables import lists_of_lengths, unpacked
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words_of_its_class
from warploom.errors import ArgumentError

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(Facade):
    """FlashInfer's class of this name: prefills and decodes in one plan, whose keys are counted.

    Args:
        kv_layout: "NHD" or "HND", of the cache.
        device: of all tensors.

    Raises:
        ArgumentError: another layout.
    """

    words: ClassVar[Words] = {
        "last_page_len": "kv_len_arr",
        "head_dim": "head_dim_qk",
        "kv": "kv_cache",
    }

    def __init__(self, kv_layout: str = "NHD", device: Any = "cuda") -> None:
        super().__init__(torch.device(device), kv_layout)

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plan a batch on the host; index arrays on a device are waited for.

        Args:
            qo_indptr: int32 [requests + 1], where the rows of each request begin in q.
            kv_indptr: int32 [requests + 1], where its pages begin in kv_indices.
            kv_indices: int32, pages; a request may have more than its keys fill.
            kv_len_arr: int32 [requests], its keys.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size: of q and of the cache.
            causal: rows are the last tokens, and see no key after their own.
            sm_scale: factor of q.k; 1/sqrt(head_dim_qk) by default.
            logits_soft_cap: the bound of logits; None or 0 for none.
            q_data_type, kv_data_type: types or their names.
            use_profiler: refused.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            BadLength: a request has more keys than its pages hold.
            UnsupportedByEngine: types without a kernel, or a profiler.
        """
        refuse_given(use_profiler=use_profiler)
        shaping = Shaping(causal, logits_soft_cap=logits_soft_cap)
        declaration = Declaration(
            shaping.scores, paged_format(page_size, self.kv_layout), num_qo_heads, num_kv_heads,
            head_dim_qk, head_dim_vo, Types.of(q_data_type, kv_data_type), sm_scale,
        )  # fmt: skip
        pages = lists_of_lengths(kv_indptr, kv_indices, kv_len_arr, page_size)
        self._plan(Step(declaration, shaping, (qo_indptr, *pages)))

    @in_words_of_its_class
    def run(
        self,
        q: Any,
        kv_cache: Any,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Any = None,
        kv_cache_sf: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch, on the current stream.

        Args:
            q: [rows, num_qo_heads, head_dim_qk].
            kv_cache: (k, v), or one tensor [pages, 2, ...]; k is [pages, page_size, num_kv_heads,
                head_dim_qk], in layout HND with page_size and heads swapped.
            out, lse: tensors to write to, shaped as the results.
            k_scale, v_scale: numbers that q.k and the output are multiplied with; None is 1.
            logits_soft_cap: above 0 it holds in place of the plan's from there on.
            profiler_buffer, kv_cache_sf: refused.

        Returns:
            The output [rows, num_qo_heads, head_dim_vo], and log-sum-exps in base 2, float32 [rows,
            num_qo_heads].

        Raises:
            What `AttentionWrapper.run` raises.
            ArgumentError: a soft-cap of a batch that was planned without, or a scale that is not
                above 0.
            UnsupportedByEngine: an argument that is refused, or a scale of several numbers.
        """
        refuse_given(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        if logits_soft_cap and logits_soft_cap > 0:
            step = self._planned()
            if not step.declaration.scores.has_cap:
                reason = f"is {logits_soft_cap}, but plan() was given none; plan with it"
                raise ArgumentError(name="logits_soft_cap", reason=reason)
            with self._reshape(step.declaration.sm_scale, logits_soft_cap=logits_soft_cap):
                return self._attend_both(q, kv_cache, out, lse, k_scale, v_scale)
        return self._attend_both(q, kv_cache, out, lse, k_scale, v_scale)

    def _attend_both(
        self, q: Any, kv_cache: Any, out: Any, lse: Any, k_scale: Any, v_scale: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._attend(
            q, unpacked(kv_cache, self.kv_layout), out=out, lse=lse, return_lse=True,
            scales=RunScales.of(None, k_scale, v_scale),
        )  # fmt: skip
        return found


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """FlashInfer's class of this name: `BatchPrefillWithPagedKVCacheWrapper` with sinks.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf,
            backend: as of the base class.
        pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk,
            head_dim_vo, window_left: without effect; what `plan` is given holds.
    """

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = torch.bfloat16,
        kv_data_type: Any = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        del pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type
        del head_dim_qk, head_dim_vo, window_left
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf,
            backend,
        )  # fmt: skip

    @in_words_of_its_class
    def run(self, q: Any, paged_kv_cache: Any, *args: Any, **named: Any) -> Any:
        """Attention of the planned batch, as of the base class.

        Args:
            q, paged_kv_cache: as there.
            *args: the sinks, [num_qo_heads], and the factor of q.k, which holds from there on.
            **named: as there, but for sinks.

        Raises:
            ArgumentError: not these two.
            What `run` of the base class raises.
        """
        if len(args) != 2:
            reason = f"are {len(args)}; expected sinks and sm_scale"
            raise ArgumentError(name="arguments behind the cache", reason=reason)
        sinks, sm_scale = args
        with self._reshape(float(sm_scale)):
            return super().run(q, paged_kv_cache, sinks=sinks, **named)

    run_return_lse = partialmethod(run, return_lse=True)
