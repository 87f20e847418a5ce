"""`BatchPrefillWithPagedKVCacheWrapper`: rows of many requests over a paged cache."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, ClassVar

import numpy as np

from warploom.engines.flashinfer.declared import Declaration, Types, paged_format, splits_are_fixed
from warploom.engines.flashinfer.facade import (
    Facade,
    RunScales,
    Step,
    takes_a_new_batch,
    workspace_device,
)
from warploom.engines.flashinfer.graphs import bounds_of_buffers, check_batch, check_sizes
from warploom.engines.flashinfer.masks import Masks
from warploom.engines.flashinfer.refusals import checked_backend, refuse_given, refuse_more
from warploom.engines.flashinfer.tables import (
    Pages,
    check_seq_lens,
    host,
    lengths_of,
    page_lists,
    unpacked,
)
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words_of_its_class
from warploom.errors import ArgumentError
from warploom.scheduler.model.bounds import Bounds


class BatchPrefillWithPagedKVCacheWrapper(Facade):
    """FlashInfer's wrapper of this name, by `warploom.AttentionWrapper` over `warploom.Paged`.

    Args:
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        kv_layout: "NHD" or "HND", of the cache.
        use_cuda_graph: runs may be captured, and replayed with later plans of as many requests and
            of no more rows than the first. The buffers are then needed for their sizes; nothing is
            written to them.
        qo_indptr_buf, paged_kv_indptr_buf: [requests + 1].
        paged_kv_indices_buf: as long as the longest list of pages.
        paged_kv_last_page_len_buf: [requests].
        custom_mask_buf, mask_indptr_buf: of masks for graphs: bytes, and requests + 1.
        backend: a hint of speed, without effect; "cudnn" is refused.
        jit_args, jit_kwargs: refused.

    Raises:
        ArgumentError: no workspace, another layout, or buffers that are missing or do not match.
        UnsupportedByEngine: `jit_args`, or a back end that means something else.
    """

    words: ClassVar[Words] = {
        "kv_indptr": "paged_kv_indptr",
        "kv_indices": "paged_kv_indices",
        "last_page_len": "paged_kv_last_page_len",
        "head_dim": "head_dim_qk",
    }
    pages_of_graphs = "paged_kv_indices_buf"

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
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse_given(jit_args=jit_args, jit_kwargs=jit_kwargs)
        checked_backend(backend)
        super().__init__(workspace_device(float_workspace_buffer), kv_layout, use_cuda_graph)
        self._room: tuple[int, int] | None = None  # requests and pages of graphs
        self._paged_kv_indices_buf = paged_kv_indices_buf  # SGLang writes its lists there
        buffers = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        self._masks = Masks(self.device, buffers if use_cuda_graph else None)
        if use_cuda_graph:
            self._room = check_batch(
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
            )
            if check_sizes(qo_indptr_buf=qo_indptr_buf) != [self._room[0] + 1]:
                reason = f"has {len(qo_indptr_buf)} entries; expected {self._room[0] + 1}"
                raise ArgumentError(name="qo_indptr_buf", reason=reason)

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch; see `AttentionWrapper.plan` for what is waited for, and checked where.

        Args:
            qo_indptr: int32 [requests + 1], where the rows of each request begin in q.
            paged_kv_indptr: int32 [requests + 1], where its pages begin in paged_kv_indices.
            paged_kv_indices: int32, pages.
            paged_kv_last_page_len: int32 [requests], tokens in each last page.
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo: of q and of the cache;
                values have head_dim_qk lanes by default.
            custom_mask: flags of all requests one after the other, each [rows, keys]: True where a
                row sees a key. It takes the place of `causal`.
            packed_custom_mask: its bits, uint8, little-endian and each request in whole bytes, as
                `segment_packbits` makes them; they take the place of custom_mask.
            causal: rows are the last tokens, and see no key after their own.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            use_fp16_qk_reduction, non_blocking, seq_lens_q, block_tables, max_token_per_sequence,
                max_sequence_kv: without effect.
            sm_scale: factor of q.k; 1/sqrt(head_dim_qk) by default.
            window_left: keys before a row's own that it sees, beside a mask, too; -1 for all.
            logits_soft_cap: the bound of logits; None or 0 for none.
            rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
            q_data_type, kv_data_type, o_data_type: types or their names. Keys and values have that
                of q or 8 bits; outputs are converted from that of q.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr:
                refused.
            seq_lens: int32 [requests], compared with the page table where both lie on the host.
            fixed_split_size, disable_split_kv: either gives `batch_invariant=True`.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            UnsupportedByEngine: types without a kernel, or an argument that is refused.
            ArgumentError: a mask of another size.
            BadLength: `seq_lens` differs from the page table.
            FrozenByGraph, BoundsExceeded: for a graph, another declaration, more rows than the
                first batch had, or another number of requests.
        """
        del use_fp16_qk_reduction, non_blocking, seq_lens_q, block_tables
        del max_token_per_sequence, max_sequence_kv
        refuse_given(
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        tables = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        pages = page_lists(*tables, self.device if self._room else None)
        check_seq_lens(seq_lens, pages, page_size)
        tensors = self._bits(custom_mask, packed_custom_mask, qo_indptr, pages, page_size)
        shaping = Shaping(
            causal, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta,
            bool(tensors),
        )  # fmt: skip
        declaration = Declaration(
            shaping.scores, paged_format(page_size, self.kv_layout), num_qo_heads, num_kv_heads,
            head_dim_qk, head_dim_vo, Types.of(q_data_type, kv_data_type, o_data_type), sm_scale,
            splits_are_fixed(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        step = Step(declaration, shaping, (qo_indptr, *pages), tensors=tensors)
        self._plan(step, self._bounds_of(qo_indptr, page_size))

    begin_forward = plan

    def _bounds_of(self, qo_indptr: Any, page_size: int) -> Bounds | None:
        """Of graphs; the rows are those of the first batch."""
        if self._room is None:
            return None
        rows = host(qo_indptr[-1:])[0] if self._bounds is None else self._bounds.max_q_rows
        return bounds_of_buffers(self._room, len(qo_indptr) - 1, int(rows), page_size)

    def _bits(
        self, custom: Any, packed: Any, qo_indptr: Any, pages: Pages, page_size: int
    ) -> dict[str, Any]:
        """A mask as values of fields, if there is one."""
        if custom is None and packed is None:
            return {}
        q_lens, kv_lens = np.diff(host(qo_indptr)), lengths_of(pages, page_size)
        return self._masks.inputs(custom, packed, q_lens, kv_lens)

    @in_words_of_its_class
    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of the planned batch, on the current stream.

        Args:
            q: [rows, num_qo_heads, head_dim_qk].
            paged_kv_cache: (k, v), or one tensor [pages, 2, ...]; k is [pages, page_size,
                num_kv_heads, head_dim_qk], in layout HND with page_size and heads swapped.
            *args: refused.
            q_scale, k_scale: numbers that q.k is multiplied with; None is 1.
            v_scale: likewise of the output.
            out, lse: tensors to write to: [rows, num_qo_heads, head_dim_vo], and float32 [rows,
                num_qo_heads]. `lse` is written with `return_lse` alone.
            return_lse: return the log-sum-exps, too, in base 2; they count the sinks.
            enable_pdl, use_fp16_softmax: without effect.
            window_left: that of the plan, or None.
            sinks: [num_qo_heads], logits without values in the denominators of the softmax.
            kv_cache_sf, skip_softmax_threshold_scale_factor, uses_spcompress: refused.

        Returns:
            The output [rows, num_qo_heads, head_dim_vo], or (output, log-sum-exps [rows,
            num_qo_heads]). Rows that see no key have 0 and -inf.

        Raises:
            What `AttentionWrapper.run` raises.
            ArgumentError: another window than the plan's, or a scale that is not above 0.
            UnsupportedByEngine: an argument that is refused, or a scale of several numbers.
            ForbiddenUnderCapture: the first run of a wrapper with scales or sinks is captured.
        """
        del enable_pdl, use_fp16_softmax
        refuse_more(args)
        refuse_given(
            kv_cache_sf=kv_cache_sf, uses_spcompress=uses_spcompress,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        self._check_window(window_left)
        return self._attend(
            q, unpacked(paged_kv_cache, self.kv_layout), out=out, lse=lse, return_lse=return_lse,
            scales=RunScales.of(q_scale, k_scale, v_scale), sinks=sinks,
        )  # fmt: skip

    run_return_lse = partialmethod(run, return_lse=True)

    @in_words_of_its_class
    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
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
            return self.run(
                q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
            )

    forward_return_lse = partialmethod(forward, return_lse=True)
