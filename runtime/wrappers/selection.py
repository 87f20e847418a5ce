"""Attention over selected pages: each request and key/value head has its own list of pages.

Selections as in Quest change at every step and in every layer. They stay on the device: the kernel
reads the caller's tensor in place of a plan's block list.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.calls import explained
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.stand_ins import uncompiled
from warploom.runtime.formats.selected import Selected
from warploom.runtime.wrappers.inspectable import lose_plan
from warploom.runtime.wrappers.selected_pages import SelectedPages
from warploom.runtime.wrappers.wrapper import AttentionWrapper


class PageSelectionWrapper(AttentionWrapper):
    """An `AttentionWrapper` over a paged cache whose page table is a selection for each head.

    A selection is an int32 tensor [requests, num_kv_heads, budget] on the wrapper's device, which
    `plan` takes as `kv_indices`, in place of a list of pages. It lists the pages that the request's
    queries read in that head; `last_page_len` is the length of the last page in the list. All heads
    of a request read the same number of pages, which `kv_indptr` gives. As in any paged cache,
    `kv_pos` counts along the list, and queries are at its end: it is the position in a cache from
    which the other pages were evicted, and not the position in the sequence.

    A plan depends on the numbers of pages only; page numbers may change at any time. `select` takes
    another tensor, such as the next layer's, if its shape and strides are those of the planned
    tensor; other shapes need a new plan. New contents of the same tensor need no call, so that a
    CUDA graph may hold the kernels that make the selection and the attention over it. Each entry
    that is read must be a page of the cache. On the CPU `run` checks that; on a GPU only
    `check_selection` does, and a wrong entry reads memory outside of the cache.
    """

    _selected: SelectedPages

    @classmethod
    def planned_format(cls, kv_format: KVFormat) -> Selected:
        """Raises ArgumentError for a format that is not paged."""
        return Selected.of(kv_format)

    @uncompiled("a batch is planned outside of the compiled function, which runs it")
    @partial(explained, refused=lose_plan)
    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any = None,
        last_page_len: Any = None,
        *,
        kv_lens: Any = None,
        q_rows: int | None = None,
        **inputs: Any,
    ) -> None:
        """Distribute the work of a batch, on the host; see `AttentionWrapper.plan`.

        Args:
            qo_indptr: int32 [requests + 1], where each request's query rows begin.
            kv_indptr: int32 [requests + 1], in pages that are read, the same number in each head.
            kv_indices: the selection, an int32 tensor [requests or more, num_kv_heads, budget] on
                the wrapper's device. It is not copied: runs read this tensor itself, until `select`
                or the next plan gives another.
            last_page_len: int32 [requests], tokens in the last page of each list.
            kv_lens: not accepted for paged caches.
            q_rows: rows of the batch, if given.
            **inputs: values of the variant's fields.

        Raises:
            BadLength: a request reads more pages than the selection lists.
            WrongStride: the last stride of the selection is not 1, or its strides are too large.
            ArgumentError: the selection is no tensor, or the back end does not support selections.
            and those of `AttentionWrapper.plan`.
        """
        super().plan(
            qo_indptr, kv_indptr, kv_indices, last_page_len,
            kv_lens=kv_lens, q_rows=q_rows, **inputs,
        )  # fmt: skip

    def run(self, q: Any = ..., kv: Any = ..., **rest: Any) -> Any:
        """Attention over the selected pages; see `AttentionWrapper.run`.

        Args:
            q, kv: queries and the cache.
            **rest: `out`, `lse`, `max_scores`, `return_lse`, `return_aux` and values of the
                variant's fields, passed on.

        Returns:
            The output, and with `return_lse` the log-sum-exp, with `return_aux` an `AuxOutput`.

        Raises:
            IndexOutOfRange: on the CPU, an entry of the selection that is no page of the cache.
            and those of `AttentionWrapper.run`.
        """
        return super().run(q, kv, **rest)

    def check_selection(self, kv: Any) -> None:
        """Raise for the first entry that a run would read outside of the cache now.

        On a GPU it waits for the device, so it is meant for debugging: call it before `run`.

        Args:
            kv: the cache, as `run` takes it.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            IndexOutOfRange: an entry is no page of the cache.
            ForbiddenUnderCapture: the current stream is being captured.
        """
        self._selected.check(kv)

    def select(self, selection: Any) -> None:
        """Let runs read another tensor from now on; its shape and strides must be as planned.

        It may have more requests than the planned tensor. For other shapes, plan again.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            WrongShape, WrongStride, WrongDType, WrongDevice: the tensor is not as planned.
            InUse: another thread runs or plans this wrapper.
        """
        self._selected.select(selection)

    def _selects(self) -> SelectedPages:
        self._selected = SelectedPages(self._declared, self._state, self._compiled)
        return self._selected
