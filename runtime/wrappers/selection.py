"""Attention over selected pages: each request and key/value head has its own list of pages.

Selections as in Quest change at every step and in every layer. They stay on the device: the kernel
reads the caller's tensor in place of a plan's block list.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warploom.calls import explained
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.stand_ins import uncompiled
from warploom.errors import (
    ArgumentError,
    IndexOutOfRange,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Batch
from warploom.runtime.formats.lists import indptr
from warploom.runtime.formats.selected import Selected, SelectedBatch
from warploom.runtime.inputs.args import KV, checked_kv, key_value
from warploom.runtime.operators.custom_op import Result
from warploom.runtime.strategies.planner import as_many_rows
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.tensors import as_torch, byte_span
from warploom.runtime.wrappers.planning import lose_plan
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

    _batch: SelectedBatch | None
    _selection: torch.Tensor  # the tensor that runs read, once there is a plan

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

    def _lowered(self, given: Arguments) -> SelectedBatch:
        refuse_under_capture(self.device, "plan() was called", "Call it before or after.")
        if self.backend == "reference":
            raise ArgumentError(name="backend", reason="selections need a compiled one")
        if given.kv_indices is not None:
            requests = len(indptr(given.qo_indptr, "qo_indptr")) - 1
            selection = self._checked(given.kv_indices, "kv_indices", requests)
            given = given._replace(kv_indices=selection)
        batch = as_many_rows(make_batch(Selected.of(self.kv_format), *given[:5]), given.q_rows)
        assert isinstance(batch, SelectedBatch)
        return batch

    def _nobody_looks(self) -> bool:
        return False

    def _take(self, batch: Batch, inputs: dict[str, Any]) -> None:
        super()._take(batch, inputs)
        assert isinstance(batch, SelectedBatch)  # from `_lowered`
        self._use(batch.selection)

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

    def _admit_and_launch(self, q: torch.Tensor, kv: KV, *rest: Any, **more: Any) -> Result:
        """Run; on the CPU each run comes here, so that its selection is checked first."""
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

        On a GPU it waits for the device, so it is meant for debugging: call it before `run`.

        Args:
            kv: the cache, as `run` takes it.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            IndexOutOfRange: an entry is no page of the cache.
            ForbiddenUnderCapture: the current stream is being captured.
        """
        if self._batch is None:
            raise self._not_planned()
        remedy = "Call it before the capture, or between replays."
        refuse_under_capture(self.device, "check_selection() was called", remedy)
        num_pages = torch.from_numpy(self._batch.num_pages).to(self.device)
        entries = self._selection[: len(num_pages)]
        pages = min(len(x) for x in key_value(checked_kv(kv, self.kv_format)))
        place = torch.arange(entries.shape[2], device=self.device)
        read = place < num_pages[:, None, None]
        wrong = read & ((entries < 0) | (entries >= pages))
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            index = ", ".join(map(str, at))
            value = int(entries[at])
            raise IndexOutOfRange(name="kv_indices", index=index, value=value, last=pages - 1)

    def select(self, selection: Any) -> None:
        """Let runs read another tensor from now on; its shape and strides must be as planned.

        It may have more requests than the planned tensor. For other shapes, plan again.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            WrongShape, WrongStride, WrongDType, WrongDevice: the tensor is not as planned.
            InUse: another thread runs or plans this wrapper.
        """
        held = self._guard
        held.enter_plan()
        try:
            if self._batch is None:
                raise self._not_planned()
            before = self._selection
            tensor = self._checked(selection, "selection", min(1, before.shape[0]))
            if tensor.shape[0] < before.shape[0] or tensor.shape[2] != before.shape[2]:
                raise WrongShape(
                    name="selection",
                    got=tuple(tensor.shape),
                    expected=f"{tuple(before.shape)}, as planned",
                    remedy=" Plan again with it, as kv_indices.",
                )
            if tensor.stride() != before.stride():
                raise WrongStride(
                    name="selection",
                    got=tensor.stride(),
                    expected=f"expected {before.stride()}, as planned",
                    remedy="Plan again with it, or lay it out as the planned one.",
                )
            self._use(tensor)
        finally:
            held.leave_plan()

    def _use(self, tensor: torch.Tensor) -> None:
        self._selection = tensor
        self._params.set("indices", tensor.data_ptr())
        assert self._launcher is not None  # `plan` refuses the reference
        self._launcher.reads("selection", tensor)

    def _checked(self, selection: Any, name: str, requests: int) -> torch.Tensor:
        if isinstance(selection, (list, tuple)):  # runs would not see new contents of a list
            reason = f"is a {type(selection).__name__}, and runs read it where it lies"
            raise ArgumentError(
                name=name, reason=f"{reason}: give a torch.int32 tensor on {self.device}"
            )
        tensor = as_torch(selection, name, shared=True)
        refuse_freed(tensor, name, byte_span(tensor))
        if tensor.device != self.device:
            raise WrongDevice(name=name, got=str(tensor.device), expected=str(self.device))
        if tensor.dtype != torch.int32:
            raise WrongDType(
                name=name,
                got=str(tensor.dtype),
                expected="torch.int32",
                remedy="Runs read it where it lies; convert it with .to(torch.int32).",
            )
        heads = self.heads.num_kv
        if tensor.dim() != 3 or tensor.shape[0] < requests or tensor.shape[1] != heads:
            raise WrongShape(
                name=name,
                got=tuple(tensor.shape),
                expected=f"[requests>={requests}, kv_head={heads}, budget]",
            )
        if tensor.numel() and tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise WrongStride(name=name, got=tensor.stride(), expected="the last must be 1")
        return tensor
