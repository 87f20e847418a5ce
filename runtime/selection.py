"""Attention over selected pages: each request and key/value head reads a list of its own.

Selections as Quest makes them change at every step and in every layer. They stay on the device: a
kernel reads the caller's tensor where the block list of a plan would be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from warploom.dsl.stand_ins import unseen
from warploom.errors import (
    ArgumentError,
    BadLength,
    IndexOutOfRange,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.args import KV, checked_kv, key_value
from warploom.runtime.batch import Batch
from warploom.runtime.calls import explained
from warploom.runtime.custom_op import Result
from warploom.runtime.formats import format_of
from warploom.runtime.formats.lists import indptr, segments_of
from warploom.runtime.graph import refuse_under_capture
from warploom.runtime.plain import refuse_freed
from warploom.runtime.tensors import as_torch, byte_span, host_int32
from warploom.runtime.wrapper import AttentionWrapper
from warploom.scheduler.bounds import INT32_MAX


class PageSelectionWrapper(AttentionWrapper):
    """An `AttentionWrapper` over a paged cache whose page table is a selection for each head.

    A selection is an int32 tensor [requests, num_kv_heads, budget] on the wrapper's device: the
    pages that the request's queries read through that head, the last of them being the one that
    `last_page_len` speaks of. All heads of a request read equally many. As in any paged cache,
    `kv_pos` counts along the list, so that queries stand at its end: it is the position in a cache
    from which the other pages were evicted, and not that in the sequence.

    `plan` is for numbers of pages; their names may change at any time. `select` takes another
    tensor, such as the next layer's; new contents of the same tensor need no call, so that a CUDA
    graph may hold what makes the selection and the attention over it.
    """

    _plans_blocks = False  # the selection is the list
    _selection: torch.Tensor | None = None
    _num_pages: torch.Tensor

    @explained
    @unseen
    def plan(  # type: ignore[override]
        self,
        qo_indptr: Any,
        selection: Any,
        num_pages: Any,
        last_page_len: Any,
        **inputs: Any,
    ) -> None:
        """Distribute the work of a batch; see `AttentionWrapper.plan`.

        Args:
            qo_indptr: int32 [requests + 1], where each request's query rows begin.
            selection: the tensor that `run` reads; its contents do not matter here. Each entry that
                is read must be a page of the cache: on the CPU `run` checks that, on a GPU only
                `check_selection` does, and a wrong entry reads memory outside of the cache.
            num_pages: int32 [requests], entries that are read of each request's lists.
            last_page_len: int32 [requests], tokens in the last page of each list.
            **inputs: values of the variant's fields.

        Raises:
            BadIndptr, BadLength, WrongShape, WrongDType, WrongDevice, WrongStride: a wrong array.
            and those of `AttentionWrapper.plan`.
        """
        self._guard.enter_plan()
        try:
            self._plan_selected(qo_indptr, selection, num_pages, last_page_len, inputs)
        except BaseException:
            self._forget()
            raise
        finally:
            self._guard.leave_plan()

    def _plan_selected(
        self,
        qo_indptr: Any,
        selection: Any,
        num_pages: Any,
        last_page_len: Any,
        inputs: dict[str, Any],
    ) -> None:
        refuse_under_capture(self.device, "plan() was called", "Call it before or after.")
        if not format_of(self.kv_format).takes_selections or self.backend == "reference":
            reason = f"selections need a compiled back end and Paged, not {self.kv_format}"
            raise ArgumentError(name="kv_format", reason=reason)
        rows = indptr(qo_indptr, "qo_indptr")
        tensor = self._checked(selection, len(rows) - 1)
        batch = selected_batch(rows, tensor, num_pages, last_page_len, self.kv_format.block_kv)
        self._plan(batch, inputs)
        self._num_pages = torch.from_numpy(host_int32(num_pages, "num_pages")).clone()
        self._use(tensor)

    def run(self, q: Any, kv: Any, **rest: Any) -> Any:
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

    def _admit_and_launch(self, q: torch.Tensor, kv: KV, *rest: Any, **more: Any) -> Result:
        """On the CPU each run comes here, so that no run reads a selection that was not checked."""
        if self.device.type != "cpu":
            return super()._admit_and_launch(q, kv, *rest, **more)
        self.check_selection(kv)
        try:
            return super()._admit_and_launch(q, kv, *rest, **more)
        finally:
            assert self._launcher is not None  # `plan` refuses the reference
            self._launcher.forget()

    def check_selection(self, kv: Any) -> None:
        """Raise for the first entry that a run would read outside of the cache now.

        On a GPU it waits for the device, so it is for finding mistakes: call it before `run`.

        Args:
            kv: the cache, as `run` takes it.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            IndexOutOfRange: an entry is no page of the cache.
            ForbiddenUnderCapture: the current stream is being captured.
        """
        if self._batch is None or self._selection is None:
            raise self._not_planned()
        remedy = "Call it before the capture, or between replays."
        refuse_under_capture(self.device, "check_selection() was called", remedy)
        entries = self._selection[: len(self._num_pages)]
        pages = min(len(x) for x in key_value(checked_kv(kv, self.kv_format)))
        place = torch.arange(entries.shape[2], device=self.device)
        read = place < self._num_pages.to(self.device)[:, None, None]
        wrong = read & ((entries < 0) | (entries >= pages))
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            index = ", ".join(map(str, at))
            value = int(entries[at])
            raise IndexOutOfRange(name="selection", index=index, value=value, last=pages - 1)

    def select(self, selection: Any) -> None:
        """Read another tensor from the next run on; shape and strides are those of the plan.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            WrongShape, WrongStride, WrongDType, WrongDevice: not as planned.
            InUse: another thread runs or plans this wrapper.
        """
        self._guard.enter_plan()
        try:
            before = self._selection
            if self._batch is None or before is None:
                raise self._not_planned()
            tensor = self._checked(selection, before.shape[0])
            if tensor.shape[2] != before.shape[2] or tensor.stride() != before.stride():
                raise WrongStride(
                    name="selection", got=tensor.stride(), expected=f"{before.stride()}, as planned"
                )
            self._use(tensor)
        finally:
            self._guard.leave_plan()

    def _use(self, tensor: torch.Tensor) -> None:
        self._selection = tensor  # torch reuses its memory on its own stream alone, once dropped
        self._params.set("indices", tensor.data_ptr())
        assert self._launcher is not None  # `plan` refuses the reference
        self._launcher.reads("selection", tensor)

    def _checked(self, selection: Any, requests: int) -> torch.Tensor:
        if isinstance(selection, (list, tuple)):  # new contents of a copy would not be seen
            reason = f"is a {type(selection).__name__}, and runs read it where it lies"
            raise ArgumentError(
                name="selection", reason=f"{reason}: give a torch.int32 tensor on {self.device}"
            )
        tensor = as_torch(selection, "selection", shared=True)
        refuse_freed(tensor, "selection", byte_span(tensor))
        if tensor.device != self.device:
            raise WrongDevice(name="selection", got=str(tensor.device), expected=str(self.device))
        if tensor.dtype != torch.int32:
            raise WrongDType(
                name="selection",
                got=str(tensor.dtype),
                expected="torch.int32",
                remedy="Runs read it where it lies; convert it with .to(torch.int32).",
            )
        heads = self.heads.num_kv
        if tensor.dim() != 3 or tensor.shape[0] < requests or tensor.shape[1] != heads:
            raise WrongShape(
                name="selection",
                got=tuple(tensor.shape),
                expected=f"[requests>={requests}, kv_head={heads}, budget]",
            )
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise WrongStride(name="selection", got=tensor.stride(), expected="the last must be 1")
        return tensor


def selected_batch(
    rows: np.ndarray[Any, Any],
    selection: torch.Tensor,
    num_pages: Any,
    last_page_len: Any,
    page_size: int,
) -> Batch:
    """Lengths of a batch in the planner's form; its block lists are those of the selection.

    Args:
        rows: int32 [requests + 1], checked.
        selection: [requests or more, kv heads, budget].
        num_pages, last_page_len: see `PageSelectionWrapper.plan`.
        page_size: tokens of a page.

    Raises:
        WrongShape, BadLength: a wrong number of pages or tokens.
        WrongStride: entries lie further apart than kernels count.
    """
    requests, budget = len(rows) - 1, selection.shape[2]
    pages, last = host_int32(num_pages, "num_pages"), host_int32(last_page_len, "last_page_len")
    for name, array in (("num_pages", pages), ("last_page_len", last)):
        if len(array) != requests:
            raise WrongShape(name=name, got=array.shape, expected=f"({requests},), one per request")
    most = min(budget, INT32_MAX // page_size)
    for name, array, low, high, read in (
        ("num_pages", pages, 0, most, np.ones(requests, bool)),
        ("last_page_len", last, 1, page_size, pages > 0),
    ):
        wrong = np.flatnonzero(read & ((array < low) | (array > high)))
        if wrong.size:
            at = int(wrong[0])
            raise BadLength(name=name, index=at, value=int(array[at]), expected=f"{low} to {high}")
    kv_lens = np.where(pages > 0, (pages - 1) * page_size + last, 0).astype(np.int32)
    segments = segments_of(rows, kv_lens)
    heads = selection.shape[1]
    of_request, of_head = (selection.stride(axis) for axis in (0, 1))
    last_entry = max(requests - 1, 0) * of_request + (heads - 1) * of_head + budget
    if max(last_entry, of_head if heads > 1 else 0) > INT32_MAX:
        expected = "the last entry must lie within 2**31 - 1 entries of the first"
        raise WrongStride(name="selection", got=selection.stride(), expected=expected)
    segments["index_begin"] = np.arange(requests) * of_request
    segments["index_head_stride"] = of_head if heads > 1 else 0
    return Batch(segments, np.zeros(0, np.int32), np.diff(rows), kv_lens, int(rows[-1]), 0)
