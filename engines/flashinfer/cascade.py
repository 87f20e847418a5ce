"""`MultiLevelCascadeAttentionWrapper`: page tables level by level become one table and one plan.

FlashInfer's module of this name has the merges of states, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from warploom.dsl.types.formats import Composed
from warploom.engines.flashinfer.declared import Declaration, Types, paged_format
from warploom.engines.flashinfer.facade import Facade, Step, takes_a_new_batch, workspace_device
from warploom.engines.flashinfer.graphs import check_requests, check_room, check_sizes
from warploom.engines.flashinfer.refusals import checked_encoding, refuse
from warploom.engines.flashinfer.states import merge_state, merge_state_in_place, merge_states
from warploom.engines.flashinfer.tables import (
    Pages,
    check_lists,
    host,
    lengths_of,
    page_lists,
    unpacked,
)
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words, in_words_of_its_class
from warploom.errors import ArgumentError
from warploom.runtime.calls.compose import Level, compose
from warploom.scheduler.model.bounds import Bounds

__all__ = [
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

_THROUGH = (
    "In warploom.AttentionWrapper(variant, kv_format=warploom.Composed(page_size)) positions count "
    "through all levels: give it warploom.Causal() & warploom.SlidingWindow(left), warploom.Rope() "
    "or warploom.Alibi(), and plan(qo_indptr, **warploom.compose(levels, page_size=page_size))."
)


class MultiLevelCascadeAttentionWrapper(Facade):
    """FlashInfer's wrapper of this name, by `AttentionWrapper` over `warploom.Composed`.

    Args:
        num_levels: how many tables there are, the most shared one first.
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        kv_layout: "NHD" or "HND", of the cache.
        use_cuda_graph: runs may be captured, and replayed with later plans of as many requests and
            of no more rows than the first. The lists of buffers are then needed for their sizes;
            nothing is written to them.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr: a buffer for each level.

    Raises:
        ArgumentError: no workspace, another layout, or buffers that are missing.
    """

    words: ClassVar[Words] = {
        "kv_indices": "pages_of_all_levels",
        "parts": "paged_kv_last_page_len",
        "of a part": "of a level",
        "another part": "another level",
    }
    pages_of_graphs = "paged_kv_indices_buf_arr"

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
    ) -> None:
        super().__init__(workspace_device(float_workspace_buffer), kv_layout, use_cuda_graph)
        self._levels = num_levels
        self._requests, self._pages = 0, [0]
        if use_cuda_graph:
            check_sizes(
                qo_indptr_buf_arr=qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr=paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
            )  # fmt: skip
            self._requests = len(qo_indptr_buf_arr[-1]) - 1
            check_room(self._requests, "qo_indptr_buf_arr[-1]")
            self._pages = [len(one) for one in paged_kv_indices_buf_arr]

    def reset_workspace_buffer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, float_workspace_buffer: Any, int_workspace_buffers: Any = None
    ) -> None:
        """Without effect, as of the other wrappers.

        Args:
            float_workspace_buffer: any tensor on the device of the wrapper.
            int_workspace_buffers: not used.

        Raises:
            ArgumentError: no tensor, or one on another device.
        """
        super().reset_workspace_buffer(float_workspace_buffer)

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        qo_indptr_arr: Sequence[Any],
        paged_kv_indptr_arr: Sequence[Any],
        paged_kv_indices_arr: Sequence[Any],
        paged_kv_last_page_len: Sequence[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plan all levels on the host; index arrays on a device are waited for.

        Args:
            qo_indptr_arr: for each level int32 [groups + 1], where the rows of each group begin;
                the groups of the last level are the requests.
            paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len: for each level the
                pages of its groups, int32 [groups + 1], [pages] and [groups]. Shared levels end
                with full pages.
            num_qo_heads, num_kv_heads, head_dim, page_size: of q and of the cache.
            causal: rows are the last tokens of the last level, and see no key after their own.
            pos_encoding_mode, window_left, rope_scale, rope_theta: refused, unless off.
            use_fp16_qk_reduction: without effect.
            sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
            logits_soft_cap: the bound of logits; None or 0 for none.
            q_data_type, kv_data_type: types or their names.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            ArgumentError: another number of levels, groups that begin within a request, a shared
                level that ends within a page, or a request with more rows than keys in its last
                level where `causal` is asked for.
            UnsupportedByEngine: positions or types that are refused.
            FrozenByGraph, BoundsExceeded: for a graph, another declaration, more rows than the
                first batch had, or another number of requests.
        """
        del use_fp16_qk_reduction, rope_scale, rope_theta
        reason = "positions there count anew in each level"
        if checked_encoding(pos_encoding_mode) != "NONE":
            refuse(f"pos_encoding_mode={pos_encoding_mode!r} of a cascade", reason, _THROUGH)
        if window_left >= 0:
            refuse(f"window_left={window_left} of a cascade", reason, _THROUGH)
        given = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
        if {len(one) for one in given} != {self._levels}:
            reason = f"has lists of {[len(one) for one in given]} levels; expected {self._levels}"
            raise ArgumentError(name="plan", reason=reason)
        rows = [host(one) for one in qo_indptr_arr]
        tables = [page_lists(*lists, None) for lists in zip(*given[1:], strict=True)]
        kv_format = paged_format(page_size, self.kv_layout, Composed)
        for at, (one, table) in enumerate(zip(rows, tables, strict=True)):
            _check_level(at, one, table, page_size)
        if causal:
            _check_last(rows[-1], tables[-1], page_size)
        shaping = Shaping(causal, logits_soft_cap=logits_soft_cap)
        declaration = Declaration(
            shaping.scores, kv_format, num_qo_heads, num_kv_heads,
            head_dim, None, Types.of(q_data_type, kv_data_type), sm_scale,
        )  # fmt: skip
        levels = [
            Level(_requests(at, one, rows[-1]), *table)
            for at, (one, table) in enumerate(zip(rows, tables, strict=True))
        ]
        composed = compose(levels, page_size=page_size)
        pages = Pages(**composed)
        bounds = self._bounds_of(rows[-1], page_size) if self._use_cuda_graph else None
        self._plan(Step(declaration, shaping, (rows[-1], *pages)), bounds)

    begin_forward = plan

    def _bounds_of(self, rows: np.ndarray[Any, Any], page_size: int) -> Bounds:
        requests = len(rows) - 1
        check_requests(requests, self._requests)
        if self._bounds is not None:
            return self._bounds
        most = sum(self._pages[:-1]) * requests + self._pages[-1]  # each lists all that it shares
        return Bounds(
            requests, int(rows[-1]), sum(self._pages) * page_size, max_blocks=most,
            max_levels=max(self._levels, 1),
        )  # fmt: skip

    @in_words_of_its_class
    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        """Attention over the keys of all levels, on the current stream.

        Args:
            q: [rows, num_qo_heads, head_dim].
            paged_kv_cache: (k, v), or one tensor [pages, 2, ...]; k is [pages, page_size,
                num_kv_heads, head_dim], in layout HND with page_size and heads swapped.

        Returns:
            The output, shaped like q.

        Raises:
            What `AttentionWrapper.run` raises.
        """
        return self._attend(q, unpacked(paged_kv_cache, self.kv_layout))

    forward = run


def _requests(
    at: int, rows: np.ndarray[Any, Any], requests: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Where the groups of a level begin, counted in requests; its rows say where."""
    begins = np.searchsorted(requests, rows).astype(np.int32)
    inside = begins < len(requests)
    if not inside.all() or (requests[begins] != rows).any() or rows[-1] != requests[-1]:
        reason = f"has {rows.tolist()}, which are no begins of requests, {requests.tolist()}"
        raise ArgumentError(name=f"qo_indptr_arr[{at}]", reason=reason)
    if len(rows) == len(requests):
        return np.arange(len(requests), dtype=np.int32)
    begins[-1] = len(requests) - 1
    return begins


def _check_level(at: int, rows: np.ndarray[Any, Any], table: Pages, page_size: int) -> None:
    names = {
        "qo_indptr": "qo_indptr_arr", "kv_indptr": "paged_kv_indptr_arr",
        "kv_indices": "paged_kv_indices_arr", "last_page_len": "paged_kv_last_page_len",
    }  # fmt: skip
    words = {mine: f"{theirs}[{at}]" for mine, theirs in names.items()}
    in_words(**words)(check_lists)(rows, table, page_size)


def _check_last(rows: np.ndarray[Any, Any], table: Pages, page_size: int) -> None:
    short = np.flatnonzero(np.diff(rows) > lengths_of(table, page_size))
    if short.size:
        reason = (
            f"gives request {int(short[0])} fewer keys than rows; with causal=True rows are its "
            "last tokens. Append them to the last level first"
        )
        raise ArgumentError(name="paged_kv_indptr_arr[-1]", reason=reason)
