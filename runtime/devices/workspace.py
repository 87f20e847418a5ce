"""Device memory of a wrapper: the plan, partial results and counters, at addresses that stay."""

from __future__ import annotations

import weakref

import torch

from warploom.errors import PlanMismatch, WorkspaceTooSmall, WrongDevice, WrongDType, WrongStride
from warploom.runtime.devices.graph import is_capturing, refuse_under_capture
from warploom.runtime.devices.streams import Streams
from warploom.runtime.devices.tenancy import Tenancy
from warploom.runtime.tensors.plain import refuse_freed
from warploom.scheduler.model.layout import HEADER
from warploom.scheduler.plans.capacity import WorkspaceSize

_HEADER_BYTES = HEADER.dtype.itemsize
_FOR_A_BATCH = {
    "need": "this batch needs",
    "remedy": "Give at least that. Declare Bounds, the largest batch, and workspace_size() says "
    "beforehand what is enough for all.",
}
_ON_A_CPU = {
    "remedy": "Allocate workspace_size(bounds) bytes, asked with as many threads as there are now "
    "(torch.get_num_threads(), or WARPLOOM_THREADS)."
}


class Workspace:
    """One block of bytes, laid out by `WorkspaceSize`.

    The counters are zero whenever no kernel runs: set so when the layout is new, and left so by
    every launch. Under capture only a replay sets them, so the next plan sets them again. The
    caller's memory may serve several wrappers, one after the other: each plan takes it, waits for
    what the others enqueued there and clears the counters; from then on those of the others do not
    run.

    Attributes:
        streams: order of what uses it; None on the CPU.
    """

    def __init__(
        self, device: torch.device, memory: torch.Tensor | None = None, has_bounds: bool = True
    ) -> None:
        """Use the caller's memory, or allocate when sizes are known.

        Args:
            device: where kernels run.
            memory: contiguous uint8 tensor there; the workspace never grows then.
            has_bounds: sizes follow from declared bounds, not from the batch; for messages.

        Raises:
            WrongDevice, WrongDType, WrongStride: `memory` is not such a tensor.
        """
        self._device = device
        self.streams = Streams(device) if device.type == "cuda" else None
        for_bounds = {} if self.streams else _ON_A_CPU
        self._why = for_bounds if has_bounds else _FOR_A_BATCH
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._size: WorkspaceSize | None = None
        self._is_cleared = False  # the counters are zero, whether a graph is replayed or not
        self._plan_ints: torch.Tensor | None = None  # once asked for
        self._tenancy: Tenancy | None = None  # in the caller's memory
        if memory is not None:
            self._memory = _checked(memory, device)
            self._tenancy = Tenancy(self._memory.data_ptr(), self.streams)
            weakref.finalize(self, self._tenancy.leave)

    @property
    def is_given(self) -> bool:
        """The memory is the caller's."""
        return self._tenancy is not None

    @property
    def memory(self) -> torch.Tensor:
        """The block, uint8."""
        return self._memory

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def check(self, size: WorkspaceSize) -> None:
        """Raise unless `fit` will succeed.

        Raises:
            WorkspaceTooSmall: the caller's memory is smaller than `size.total`.
            ForbiddenUnderCapture: it must grow while a CUDA graph is being captured.
        """
        if size.total <= self.bytes:
            return
        if self._tenancy is not None:
            raise WorkspaceTooSmall(got=self.bytes, needed=size.total, **self._why)
        refuse_under_capture(
            self._device, "the workspace cannot grow", "Declare bounds, or call plan() before."
        )

    def fit(self, size: WorkspaceSize) -> None:
        """Lay the memory out for these sizes, growing it if it is too small; raises as `check`.

        What it enqueues lies in the order of streams: behind the last use, and before the next.
        A graph clears for itself: memory of a pool of graphs may be written by others in between.
        """
        is_same = size is self._size or size == self._size
        is_clear = self._is_cleared and not is_capturing(self._device)
        if is_same and is_clear and self._tenancy is None:
            return
        self.check(size)
        self._is_cleared = False  # an interrupt may come before it is
        self.await_last()
        if size.total > self.bytes:
            self._memory = torch.empty(size.total, dtype=torch.uint8, device=self._device)
            header = self._memory[size.offsets["plan"] :][:_HEADER_BYTES]
            # No plan has such a status: what memory held before is not taken for a plan that a
            # replay has made. (What a caller's memory holds may be one.)
            header.fill_(0xFF)
        if not is_same:
            self._size, self._plan_ints = size, None
        if self._tenancy is not None:
            self._tenancy.take(size.total)
        self._memory[size.offsets["arrivals"] : size.total].zero_()
        self._is_cleared = not is_capturing(self._device)

    def ready_plan_ints(self, size: WorkspaceSize) -> torch.Tensor | None:
        """The plan's part as int32, for the size that it was laid out for last.

        Let the current stream wait for what was enqueued last. None if there is more to do, for
        which `fit` is called. Not where that stream is being captured.
        """
        if size is not self._size or not self._is_cleared or self._tenancy is not None:
            return None
        if self.streams is not None:
            self.streams.current()
        return self.plan_ints

    def check_held(self) -> None:
        """Refuse to run on memory that another wrapper has planned into.

        Raises:
            PlanMismatch: another wrapper did.
        """
        if self._tenancy is not None and not self._tenancy.is_held:
            raise PlanMismatch(name="workspace", got="another wrapper's since", expected="this one")

    def await_last(self) -> None:
        """Let the current stream wait for what was enqueued last, on whichever stream."""
        if self.streams is not None:
            self.streams.current()

    def address(self, part: str) -> int:
        """Address of a part: plan, partial_o, partial_state, arrivals, votes or stamps."""
        return self._memory.data_ptr() + self.size.offsets[part]

    @property
    def stamps(self) -> torch.Tensor:
        """What kernels tell of the times of work items, uint8; empty where they tell nothing."""
        begin = self.size.offsets["stamps"]
        return self._memory[begin : begin + self.size.stamps_bytes]

    def forget_stamps(self) -> None:
        """Enqueue that no item of the plan to come has run yet."""
        if self.size.stamps_bytes:
            self.stamps.zero_()

    @property
    def plan_ints(self) -> torch.Tensor:
        """The plan's part as int32."""
        if self._plan_ints is None:
            begin = self.size.offsets["plan"]
            part = self._memory[begin : begin + self.size.plan_bytes]
            self._plan_ints = part.view(torch.int32)
        return self._plan_ints

    @property
    def size(self) -> WorkspaceSize:
        """What it is laid out for."""
        if self._size is None:
            raise RuntimeError("fit() before use")
        return self._size


def _checked(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    if memory.device != device:
        raise WrongDevice.of_written(name="workspace", got=str(memory.device), expected=str(device))
    if memory.dtype != torch.uint8:
        raise WrongDType(name="workspace", got=str(memory.dtype), expected="torch.uint8")
    strides = memory.stride()
    if not memory.is_contiguous():
        raise WrongStride(name="workspace", got=strides, expected="it must be contiguous")
    if past := memory.data_ptr() % 16:
        raise WrongStride(
            name="workspace",
            got=strides,
            expected=f"it must begin at a multiple of 16 bytes, and begins {past} past one",
            remedy="Give a slice that begins at a multiple, or a .clone() of it.",
        )
    refuse_freed(memory, "workspace", memory.numel())
    return memory.view(-1)
