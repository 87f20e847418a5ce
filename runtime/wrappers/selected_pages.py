"""Pages that a tensor of the caller's names, for plans and runs of a `PageSelectionWrapper`."""

from __future__ import annotations

from typing import Any

import torch

from warploom.errors import (
    ArgumentError,
    IndexOutOfRange,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Batch
from warploom.runtime.formats.lists import indptr
from warploom.runtime.formats.selected import Selected, SelectedBatch
from warploom.runtime.inputs.args import checked_kv, key_value
from warploom.runtime.strategies.planner import as_many_rows
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.plain import refuse_freed
from warploom.runtime.tensors.tensors import as_torch, byte_span
from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.plan_state import PlanState


class SelectedPages:
    """The selection that runs read, once there is a plan; a `Follower` of plans."""

    is_used = True  # each plan has a selection of its own

    def __init__(
        self, declared: DeclaredAttention, state: PlanState, compiled: Compiled | None
    ) -> None:
        """Begin without a selection.

        Args:
            declared: the wrapper's declaration.
            state: which has the plan.
            compiled: whose kernels read the selection; plans for the reference are refused.
        """
        self._format, self._heads = declared.kv_format, declared.heads.num_kv
        self._device, self._compiled = declared.device, compiled
        self._state = state
        self._tensor: torch.Tensor
        self._num_pages: torch.Tensor

    def read(self, given: Arguments) -> SelectedBatch:
        """Check the arguments of `plan`; see `PageSelectionWrapper.plan`."""
        refuse_under_capture(self._device, "plan() was called", "Call it before or after.")
        if self._compiled is None:
            raise ArgumentError(name="backend", reason="selections need a compiled one")
        if given.kv_indices is not None:
            requests = len(indptr(given.qo_indptr, "qo_indptr")) - 1
            selection = self._checked(given.kv_indices, "kv_indices", requests)
            given = given._replace(kv_indices=selection)
        batch = as_many_rows(make_batch(Selected.of(self._format), *given[:5]), given.q_rows)
        assert isinstance(batch, SelectedBatch)
        return batch

    def follow(self, batch: Batch, planned: Planned) -> None:
        """Let runs read the selection of a new plan."""
        assert isinstance(batch, SelectedBatch)  # from `read`
        self._num_pages = torch.from_numpy(batch.num_pages)
        self._use(batch.selection)

    def check(self, kv: Any) -> None:
        """Raise for the first entry outside of the cache; see `check_selection`."""
        self._state.required()
        remedy = "Call it before the capture, or between replays."
        refuse_under_capture(self._device, "check_selection() was called", remedy)
        num_pages = self._num_pages.to(self._device)
        entries = self._tensor[: len(num_pages)]
        pages = min(len(x) for x in key_value(checked_kv(kv, self._format)))
        place = torch.arange(entries.shape[2], device=self._device)
        read = place < num_pages[:, None, None]
        wrong = read & ((entries < 0) | (entries >= pages))
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            index = ", ".join(map(str, at))
            value = int(entries[at])
            raise IndexOutOfRange(name="kv_indices", index=index, value=value, last=pages - 1)

    def select(self, selection: Any) -> None:
        """Let runs read another tensor from now on; `PageSelectionWrapper.select` documents it."""
        held = self._state.guard
        held.enter_plan()
        try:
            self._state.required()
            before = self._tensor
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
        assert self._compiled is not None  # `plan` refuses the reference
        self._tensor = tensor
        self._compiled.params.set("indices", tensor.data_ptr())
        self._compiled.launcher.reads("selection", tensor)

    def _checked(self, selection: Any, name: str, requests: int) -> torch.Tensor:
        if isinstance(selection, (list, tuple)):  # runs would not see new contents of a list
            reason = f"is a {type(selection).__name__}, and runs read it where it lies"
            raise ArgumentError(
                name=name, reason=f"{reason}: give a torch.int32 tensor on {self._device}"
            )
        tensor = as_torch(selection, name, shared=True)
        refuse_freed(tensor, name, byte_span(tensor))
        if tensor.device != self._device:
            raise WrongDevice(name=name, got=str(tensor.device), expected=str(self._device))
        if tensor.dtype != torch.int32:
            raise WrongDType(
                name=name,
                got=str(tensor.dtype),
                expected="torch.int32",
                remedy="Runs read it where it lies; convert it with .to(torch.int32).",
            )
        heads = self._heads
        if tensor.dim() != 3 or tensor.shape[0] < requests or tensor.shape[1] != heads:
            raise WrongShape(
                name=name,
                got=tuple(tensor.shape),
                expected=f"[requests>={requests}, kv_head={heads}, budget]",
            )
        if tensor.numel() and tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise WrongStride(name=name, got=tensor.stride(), expected="the last must be 1")
        return tensor
