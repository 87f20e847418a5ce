"""`BatchDecodeWithPagedKVCacheWrapper`: requests with a row of queries each, over a paged cache."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, ClassVar

import torch

from warploom.engines.flashinfer.declared import Declaration, Types, paged_format, splits_are_fixed
from warploom.engines.flashinfer.facade import (
    Facade,
    RunScales,
    Step,
    takes_a_new_batch,
    workspace_device,
)
from warploom.engines.flashinfer.graphs import bounds_of_buffers, check_batch
from warploom.engines.flashinfer.refusals import checked_backend, refuse_given, refuse_more
from warploom.engines.flashinfer.tables import Pages, check_seq_lens, page_lists, unpacked
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words_of_its_class
from warploom.errors import ArgumentError, PlanMismatch, UnequalRequests, WrongShape


class BatchDecodeWithPagedKVCacheWrapper(Facade):
    """FlashInfer's wrapper of this name, by `warploom.AttentionWrapper` over `warploom.Paged`.

    Args:
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        kv_layout: "NHD" or "HND", of the cache.
        use_cuda_graph: runs may be captured, and replayed with later plans of as many requests. The
            three buffers are then needed for their sizes; nothing is written to them.
        use_tensor_cores, backend: hints of speed, without effect; "cudnn" is refused.
        paged_kv_indptr_buffer, paged_kv_last_page_len_buffer: [requests + 1] and [requests].
        paged_kv_indices_buffer: as long as the longest list of pages.
        jit_args: refused.

    Attributes:
        o_data_type: what the last plan was given.

    Raises:
        ArgumentError: no workspace, another layout, or buffers that are missing or do not match.
        UnsupportedByEngine: `jit_args`, or a back end that means something else.
    """

    words: ClassVar[Words] = {"kv_indptr": "indptr", "kv_indices": "indices"}
    pages_of_graphs = "paged_kv_indices_buffer"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        refuse_given(jit_args=jit_args)
        checked_backend(backend)
        super().__init__(workspace_device(float_workspace_buffer), kv_layout, use_cuda_graph)
        self._use_tensor_cores = bool(use_tensor_cores)
        self.o_data_type: Any = None
        self._q_len, self._requests = 1, 0
        self._paged_kv_indices_buf = paged_kv_indices_buffer  # SGLang writes its lists there
        self._room: tuple[int, int] | None = None  # requests and pages of graphs
        if use_cuda_graph:
            self._room = check_batch(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
            )

    @property
    def use_tensor_cores(self) -> bool:
        """What was given, which is without effect."""
        return self._use_tensor_cores

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Plan a batch; see `AttentionWrapper.plan` for what is waited for, and checked where.

        Args:
            indptr: int32 [requests + 1], where the pages of each request begin in `indices`.
            indices: int32, pages.
            last_page_len: int32 [requests], tokens in each last page.
            num_qo_heads, num_kv_heads, head_dim, page_size: of q and of the cache.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            window_left: keys before the query's own that it sees; -1 for all.
            logits_soft_cap: the bound of logits; None or 0 for none.
            q_data_type, kv_data_type, o_data_type: types or their names. Keys and values have that
                of q or 8 bits; outputs are converted from that of q.
            data_type: for those of the first two that are None.
            sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
            rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
            non_blocking, block_tables: without effect.
            seq_lens: int32 [requests], compared with the page table where both lie on the host.
            fixed_split_size, disable_split_kv: either gives `batch_invariant=True`.
            q_len_per_req: rows of each request; several see each other causally.
            window_right: refused unless 0.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            UnsupportedByEngine: types without a kernel.
            BadLength: `seq_lens` differs from the page table.
            FrozenByGraph, BoundsExceeded, ArgumentError: for a graph, another declaration, or
                another number of requests than the first.
        """
        del non_blocking, block_tables
        self.o_data_type = o_data_type
        refuse_given(window_right=window_right)
        if q_len_per_req < 1:
            reason = f"is {q_len_per_req}; expected 1 or more"
            raise ArgumentError(name="q_len_per_req", reason=reason)
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        shaping = Shaping(
            q_len_per_req > 1, window_left, logits_soft_cap, pos_encoding_mode, rope_scale,
            rope_theta,
        )  # fmt: skip
        kv_format = paged_format(page_size, self.kv_layout)
        pages = self._pages(indptr, indices, last_page_len)
        requests = len(pages.last_page_len)
        bounds = None
        if self._room is not None:
            bounds = bounds_of_buffers(self._room, requests, requests * q_len_per_req, page_size)
        check_seq_lens(seq_lens, pages, page_size)
        where = pages.kv_indptr.device if isinstance(pages.kv_indptr, torch.Tensor) else None
        rows = torch.arange(
            0, (requests + 1) * q_len_per_req, q_len_per_req, dtype=torch.int32, device=where
        )
        declaration = Declaration(
            shaping.scores, kv_format, num_qo_heads, num_kv_heads,
            head_dim, None, Types.of(q_data_type, kv_data_type, o_data_type), sm_scale,
            splits_are_fixed(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        self._q_len, self._requests = q_len_per_req, requests
        self._plan(Step(declaration, shaping, (rows, *pages)), bounds)

    begin_forward = plan

    def _pages(self, indptr: Any, indices: Any, last_page_len: Any) -> Pages:
        pages = page_lists(indptr, indices, last_page_len, self.device if self._room else None)
        requests, entries = len(pages.last_page_len), len(pages.kv_indptr)
        if entries != requests + 1:
            others = f"last_page_len has {requests}, of {requests}"
            raise UnequalRequests(
                name="indptr", entries=entries, requests=entries - 1, others=others
            )
        return pages

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the planned batch, on the current stream.

        Args:
            q: [requests * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: (k, v), or one tensor [pages, 2, ...]; k is [pages, page_size,
                num_kv_heads, head_dim], in layout HND with page_size and heads swapped.
            *args: refused.
            q_scale, k_scale: numbers that q.k is multiplied with; None is 1.
            v_scale: likewise of the output.
            out, lse: tensors to write to: shaped like q, and float32 [rows, num_qo_heads]. `lse` is
                written with `return_lse` alone.
            return_lse: return the log-sum-exps, too, in base 2; they count the sinks.
            enable_pdl: without effect.
            window_left: that of the plan, or None.
            sinks: [num_qo_heads], logits without values in the denominators of the softmax.
            q_len_per_req: that of the plan, or None.
            skip_softmax_threshold_scale_factor, kv_cache_sf: refused.

        Returns:
            The output, shaped like q, or (output, log-sum-exps [rows, num_qo_heads]).

        Raises:
            What `AttentionWrapper.run` raises.
            ArgumentError: another window than the plan's, or a scale that is not above 0.
            PlanMismatch: other rows for each request than planned.
            UnsupportedByEngine: an argument that is refused, or a scale of several numbers.
            ForbiddenUnderCapture: the first run of a wrapper with scales or sinks is captured.
        """
        del enable_pdl
        refuse_more(args)
        factor = skip_softmax_threshold_scale_factor
        refuse_given(skip_softmax_threshold_scale_factor=factor, kv_cache_sf=kv_cache_sf)
        self._check_window(window_left)
        self._check_rows(q, q_len_per_req)
        return self._attend(
            q, unpacked(paged_kv_cache, self.kv_layout), out=out, lse=lse, return_lse=return_lse,
            scales=RunScales.of(q_scale, k_scale, v_scale), sinks=sinks,
        )  # fmt: skip

    run_return_lse = partialmethod(run, return_lse=True)

    def _check_rows(self, q: Any, told: int | None) -> None:
        """What q says of the rows of a request."""
        if told not in (None, self._q_len):
            raise PlanMismatch(name="q_len_per_req", got=told, expected=self._q_len)
        rows = q.shape[0] if len(getattr(q, "shape", ())) else 0
        if rows != self._q_len * self._requests:
            rows = f"{self._q_len * self._requests}, heads, dim"
            expected = f"[{rows}]: {self._q_len} for each of {self._requests} requests"
            raise WrongShape(name="q", got=tuple(q.shape), expected=expected)

    @in_words_of_its_class
    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
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

        The batch is planned again where it differs. Arguments, results and errors are those of
        `plan` and `run`.
        """
        with self._reshape(
            sm_scale, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, rope_scale=rope_scale, rope_theta=rope_theta,
        ):  # fmt: skip
            return self.run(
                q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                return_lse=return_lse,
            )  # fmt: skip

    forward_return_lse = partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same for CUDA graphs, with `use_cuda_graph=True`.

    Args:
        workspace_buffer: any tensor on the device.
        indptr_buffer, indices_buffer, last_page_len_buffer: read for their sizes alone.
        kv_layout, use_tensor_cores: as of the base class.
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer,
        )  # fmt: skip
