"""`BatchPrefillWithRaggedKVCacheWrapper`: keys and values of requests one behind the other."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, ClassVar

import numpy as np

from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.engines.flashinfer.declared import Declaration, Types, splits_are_fixed
from warploom.engines.flashinfer.facade import (
    Facade,
    RunScales,
    Step,
    takes_a_new_batch,
    workspace_device,
)
from warploom.engines.flashinfer.graphs import check_requests, check_room, check_sizes
from warploom.engines.flashinfer.masks import Masks
from warploom.engines.flashinfer.refusals import checked_backend, refuse_given, refuse_more
from warploom.engines.flashinfer.tables import host
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words_of_its_class
from warploom.errors import ArgumentError
from warploom.scheduler.model.bounds import Bounds


class BatchPrefillWithRaggedKVCacheWrapper(Facade):
    """FlashInfer's wrapper of this name, by `warploom.AttentionWrapper` over `warploom.Ragged`.

    Args:
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        kv_layout: "NHD" or "HND", of keys and values.
        use_cuda_graph: runs may be captured, and replayed with later plans of as many requests and
            of no more rows and keys than the first. The buffers are then needed for their sizes;
            nothing is written to them.
        qo_indptr_buf, kv_indptr_buf: [requests + 1].
        custom_mask_buf, mask_indptr_buf: of masks for graphs: bytes, and requests + 1.
        backend: a hint of speed, without effect; "cudnn" is refused.
        jit_args, jit_kwargs: refused.

    Raises:
        ArgumentError: no workspace, another layout, or buffers that are missing or do not match.
        UnsupportedByEngine: `jit_args`, or a back end that means something else.
    """

    words: ClassVar[Words] = {"head_dim": "head_dim_qk", "kv": "k and v"}

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse_given(jit_args=jit_args, jit_kwargs=jit_kwargs)
        checked_backend(backend)
        super().__init__(workspace_device(float_workspace_buffer), kv_layout, use_cuda_graph)
        buffers = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        self._masks = Masks(self.device, buffers if use_cuda_graph else None)
        self._requests = 0
        if use_cuda_graph:
            rows, keys = check_sizes(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
            self._requests = rows - 1
            if rows != keys:
                reason = f"has {keys} entries; expected {rows}, as qo_indptr_buf"
                raise ArgumentError(name="kv_indptr_buf", reason=reason)
            check_room(self._requests, "qo_indptr_buf")

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
    ) -> None:
        """Plan a batch; see `AttentionWrapper.plan` for what is waited for, and checked where.

        Args:
            qo_indptr, kv_indptr: int32 [requests + 1], where the rows of each request begin in q,
                and its keys in k and v.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo: of q, k and v; values have
                head_dim_qk lanes by default.
            custom_mask: flags of all requests one after the other, each [rows, keys]: True where a
                row sees a key. It takes the place of `causal`.
            packed_custom_mask: its bits, uint8, little-endian and each request in whole bytes, as
                `segment_packbits` makes them; they take the place of custom_mask.
            causal: rows are the last tokens, and see no key after their own.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            use_fp16_qk_reduction, non_blocking, seq_lens, seq_lens_q, max_token_per_sequence,
                max_sequence_kv: without effect; lengths are those of the two lists.
            window_left: keys before a row's own that it sees, beside a mask, too; -1 for all.
            logits_soft_cap: the bound of logits; None or 0 for none.
            sm_scale: factor of q.k; 1/sqrt(head_dim_qk) by default.
            rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
            q_data_type, kv_data_type, o_data_type: types or their names. Keys and values have that
                of q or 8 bits; outputs are converted from that of q.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr,
                v_indptr, o_indptr: refused.
            fixed_split_size, disable_split_kv: either gives `batch_invariant=True`.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            UnsupportedByEngine: types without a kernel, or an argument that is refused.
            ArgumentError: a mask of another size.
            FrozenByGraph, BoundsExceeded: for a graph, another declaration, more rows or keys than
                the first batch had, or another number of requests.
        """
        del use_fp16_qk_reduction, non_blocking, seq_lens, seq_lens_q
        del max_token_per_sequence, max_sequence_kv
        refuse_given(
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr, o_indptr=o_indptr,
        )  # fmt: skip
        is_masked = custom_mask is not None or packed_custom_mask is not None
        tensors: dict[str, Any] = {}
        if is_masked:
            lens = np.diff(host(qo_indptr)), np.diff(host(kv_indptr))
            tensors = self._masks.inputs(custom_mask, packed_custom_mask, *lens)
        shaping = Shaping(
            causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta,
            is_masked,
        )  # fmt: skip
        declaration = Declaration(
            shaping.scores, Ragged(layout=self.kv_layout), num_qo_heads, num_kv_heads, head_dim_qk,
            head_dim_vo, Types.of(q_data_type, kv_data_type, o_data_type), sm_scale,
            splits_are_fixed(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        bounds = self._bounds_of(qo_indptr, kv_indptr) if self._use_cuda_graph else None
        lists = qo_indptr, kv_indptr, None, None
        self._plan(Step(declaration, shaping, lists, tensors=tensors), bounds)

    begin_forward = plan

    def _bounds_of(self, qo_indptr: Any, kv_indptr: Any) -> Bounds:
        check_requests(len(qo_indptr) - 1, self._requests)
        if self._bounds is not None:
            return self._bounds
        rows, keys = int(host(qo_indptr[-1:])[0]), int(host(kv_indptr[-1:])[0])
        return Bounds(self._requests, rows, min(keys, MAX_LENGTH))

    @in_words_of_its_class
    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch, on the current stream.

        Args:
            q: [rows, num_qo_heads, head_dim_qk].
            k: [keys, num_kv_heads, head_dim_qk], in layout HND [num_kv_heads, keys, head_dim_qk].
            v: likewise, with head_dim_vo.
            *args: refused.
            q_scale, k_scale: numbers that q.k is multiplied with; None is 1.
            v_scale: likewise of the output.
            out, lse: tensors to write to: [rows, num_qo_heads, head_dim_vo], and float32 [rows,
                num_qo_heads]. `lse` is written with `return_lse` alone.
            return_lse: return the log-sum-exps, too, in base 2.
            enable_pdl: without effect.
            o_scale, kv_cache_sf: refused.

        Returns:
            The output [rows, num_qo_heads, head_dim_vo], or (output, log-sum-exps [rows,
            num_qo_heads]). Rows that see no key have 0 and -inf.

        Raises:
            What `AttentionWrapper.run` raises.
            ArgumentError: a scale that is not above 0.
            UnsupportedByEngine: an argument that is refused, or a scale of several numbers.
            ForbiddenUnderCapture: the first run of a wrapper with scales is captured.
        """
        del enable_pdl
        refuse_more(args)
        refuse_given(o_scale=None if o_scale == 1.0 else o_scale, kv_cache_sf=kv_cache_sf)
        return self._attend(
            q, (k, v), out=out, lse=lse, return_lse=return_lse,
            scales=RunScales.of(q_scale, k_scale, v_scale),
        )  # fmt: skip

    run_return_lse = partialmethod(run, return_lse=True)

    @in_words_of_its_class
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """The older way: what shapes scores is given here, and replaces what `plan` was given.

        The batch is planned again where it differs; a mask of the plan stays. Arguments, results
        and errors are those of `plan` and `run`.
        """
        del use_fp16_qk_reduction
        with self._reshape(
            sm_scale, causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        ):  # fmt: skip
            return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
