"""The step of a model, served by graphs that are captured when they are needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch

from warploom import forks
from warploom.errors import ArgumentError
from warploom.graph_errors import (
    BudgetBelowCapture,
    CaptureFailed,
    PoolBoundsExceeded,
    PoolClosed,
    PoolInUse,
)
from warploom.runtime.declaring.declare import checked_count, checked_number
from warploom.runtime.devices.device import resolve_device
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.scheduler.model.bounds import Bounds
from warploom.serving.graphs.buckets import Buckets
from warploom.serving.graphs.buffers import GraphInput, Inputs, SectionBuffers
from warploom.serving.graphs.capturing import StepRunner
from warploom.serving.graphs.cuda_driver import CudaDriver
from warploom.serving.graphs.driver import GraphDriver
from warploom.serving.graphs.host_driver import HostDriver
from warploom.serving.graphs.modes import Choice, Chooser
from warploom.serving.graphs.pieces import MODES, Flow, GraphPiece, Mode, Step
from warploom.serving.graphs.progress import shown
from warploom.serving.graphs.stats import GraphStats
from warploom.serving.graphs.store import Entry, Key, Store

_log = logging.getLogger("warploom.graphs")


class GraphPool:
    """A step of a model, as one launch, some launches, or eagerly (xLLM, section 4.2).

    A batch is padded to a bucket. The first batch of a bucket captures the step, later ones rewrite
    its inputs and replay it. Intermediate results of all captures lie in one private pool of
    memory, which is what the largest needs; what parts of the step give each other lies in
    buffers that all captures share. On a CPU a twin records the step's calls and makes them again.

    Everything that the step reads beside its inputs (weights, caches, the plan of an
    `AttentionWrapper` with `cuda_graph=True`) is read where it lay at the capture, so it must stay
    there, and may be rewritten there. The step runs in inference mode.

    Attributes:
        bounds: that were declared.
        buckets: rows that batches are padded to, in rising order.
        device: of the step.
    """

    def __init__(
        self,
        step: Callable[..., Any] | GraphPiece | Iterable[Callable[..., Any] | GraphPiece],
        inputs: Mapping[str, GraphInput],
        bounds: Bounds,
        *,
        device: torch.device | str | int | None = None,
        buckets: Iterable[int] | None = None,
        full_rows: int | None = None,
        partial_rows: int | None = None,
        max_bytes: int | None = None,
        on_failure: Literal["raise", "eager"] = "raise",
        driver: GraphDriver | None = None,
    ) -> None:
        """Declare all; nothing is captured yet.

        Args:
            step: a function, or several in a list of which each is called with what the one before
                returned; `GraphPiece` says which of them partial mode leaves out. They take inputs
                by the names of their parameters, and return one tensor or a tuple of tensors, each
                [padded rows, ...].
            inputs: what changes from batch to batch, by name.
            bounds: `max_q_rows` is the most rows of a batch.
            device: the current CUDA device by default, or the CPU.
            buckets: rows to capture for; powers of two and `max_q_rows` by default. Batches beyond
                the largest run eagerly, up to `max_q_rows`.
            full_rows, partial_rows: the most rows of a batch that full and partial mode are chosen
                for; no limit by default. 0 turns a mode off.
            max_bytes: of captures, shared and own memory together; the least recently used goes
                first. No limit by default.
            on_failure: whether a step that cannot be captured raises, or runs eagerly from then on.
            driver: in place of the device's own, for tests.

        Raises:
            ArgumentError, WrongInputs, WrongCall: arguments that cannot be.
            NoGpu, UnsupportedSpec: a device that there is not.
        """
        if not isinstance(bounds, Bounds):
            raise ArgumentError(name="bounds", reason=f"is {bounds!r}; expected Bounds(...)")
        if on_failure not in ("raise", "eager"):
            reason = f"is {on_failure!r}; expected 'raise' or 'eager'"
            raise ArgumentError(name="on_failure", reason=reason)
        if max_bytes is not None:
            checked_count("max_bytes", max_bytes)
        self.bounds, self.device = bounds, resolve_device(device)
        found = Buckets(buckets, bounds.max_q_rows)
        self.buckets, largest = found.sizes, found.sizes[-1]
        self._inputs = Inputs(inputs, largest, self.device)
        self._step = Step.of(step, self._inputs.names)
        most: dict[Mode, int] = {}
        limits: dict[Mode, int | None] = {"full": full_rows, "partial": partial_rows}
        for mode, limit in limits.items():
            most[mode] = largest if limit is None else checked_number(f"{mode}_rows", limit)
        self._chooser = Chooser(self._step, found, most)
        self._driver = driver or driver_of(self.device)
        self._between = SectionBuffers(largest, self.device)
        self._runner = StepRunner(
            self._step, self._inputs, self._between, self._driver, self.device
        )
        self._store = Store(self._driver, max_bytes)
        self._falls_back = on_failure == "eager"
        self._runs = dict.fromkeys(MODES, 0)
        self._rows = self._padding = self._failures = 0
        self._lock, self._user = forks.lock(), ""
        self._is_closed = False

    def choose(self, rows: int, mode: str | None = None) -> Choice:
        """How a batch of so many rows will be served; plan attention for its `padded_rows`.

        Raises:
            ArgumentError: rows that are no count.
            PoolBoundsExceeded: more than `bounds.max_q_rows`.
            NoSuchMode: `mode` cannot serve it.
        """
        checked_count("rows", rows)
        if rows > self.bounds.max_q_rows:
            raise PoolBoundsExceeded(name="max_q_rows", got=rows, bound=self.bounds.max_q_rows)
        return self._chooser.choose(int(rows), mode)

    def run(self, inputs: Mapping[str, torch.Tensor], *, mode: str | None = None) -> Any:
        """The step's outputs for a batch, on the current stream.

        Args:
            inputs: by name, [rows, *shape of a row], on the device.
            mode: "full", "partial" or "eager", in place of what `choose` chooses.

        Returns:
            What the last function of the step returns, cut to the batch's rows: a tensor, or a
            tuple of several. Unless the mode is eager, it is overwritten by the next run.

        Raises:
            PoolBoundsExceeded, NoSuchMode: as `choose`.
            WrongInputs, WrongDType, WrongDevice, WrongShape: inputs that were not declared so.
            CaptureFailed, BudgetBelowCapture: the step could not be captured, and `on_failure` is
                "raise". Other captures and modes still serve.
            NotStatic, OutputsChanged: the step returned what no replay could rewrite.
            ForbiddenUnderCapture: a graph is being captured on the current stream.
            PoolInUse, PoolClosed: another call is under way, or the pool is closed.
        """
        with self._used_by("run"):
            rows = self._inputs.rows(inputs)
            choice = self.choose(rows, mode)
            padded = choice.padded_rows
            self._driver.order()
            if choice.mode == "eager":
                flow = self._runner.eager(dict(inputs), rows)
                served: Mode = "eager"
            else:
                self._inputs.fill(inputs, rows)
                try:
                    flow, served = self._captured(choice.mode, padded)
                except Exception as error:
                    self._inputs.note_padding(error, "run", padded - rows)
                    raise
            self._runs[served] += 1
            self._rows += rows
            self._padding += padded - rows
        cut = [tensor[:rows] for tensor in flow] if padded > rows else list(flow)
        return tuple(cut) if len(cut) > 1 else cut[0]

    def warm_up(
        self, prepare: Callable[[int], object] | None = None, progress: bool | None = None
    ) -> int:
        """Capture the step for all buckets, the largest first, until `max_bytes` is reached.

        The inputs are padding.

        Args:
            prepare: is given the rows of each bucket before; where attention is planned for them.
            progress: show a progress bar; None lets the settings and the terminal decide.

        Returns:
            How many buckets have a capture now.

        Raises:
            CaptureFailed, NotStatic, OutputsChanged, PoolInUse, PoolClosed: as `run`.
        """
        is_cleared, wanted = False, list[Key]()
        with self._used_by("warm_up"), shown(self.buckets[::-1], progress) as buckets:
            self._driver.order()
            for rows in buckets:
                while (mode := self.choose(rows).mode) != "eager":
                    wanted.append((mode, rows))
                    if wanted[-1] in self._store:
                        break
                    if not is_cleared:
                        self._inputs.clear()
                        is_cleared = True
                    if prepare is not None:
                        prepare(rows)
                    try:
                        make = partial(self._runner.capture, mode, rows)
                        self._store.add_if_it_fits((mode, rows), make)
                        break
                    except CaptureFailed as error:
                        self._refuse(mode, rows, error)  # so that another mode is chosen
                    except Exception as error:
                        self._inputs.note_padding(error, "warm_up", rows)
                        raise
        return sum(key in self._store for key in wanted)

    def stats(self) -> GraphStats:
        """What was done so far."""
        store, entries = self._store, self._store.entries
        return GraphStats(
            dict(self._runs), tuple(entry.key for entry in entries), store.captures,
            store.evictions, self._failures, store.capture_seconds, self._rows, self._padding,
            self._driver.shared_bytes if entries else 0, sum(one.own_bytes for one in entries),
            self._inputs.num_bytes + self._between.num_bytes,
        )  # fmt: skip

    def clear(self) -> None:
        """Give up all captures, for example since weights have moved; the next runs make others."""
        with self._used_by("clear"):
            self._store.clear()
            self._runner.forget()
            self._chooser.refused.clear()

    def close(self) -> None:
        """Give up all captures for good."""
        if not self._is_closed:
            self.clear()
            self._is_closed = True

    def __enter__(self) -> GraphPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        held = len(self._store.entries)
        return f"GraphPool({held} captures for {len(self.buckets)} buckets on {self.device})"

    def _captured(self, mode: Mode, rows: int) -> tuple[Flow, Mode]:
        """Serve what the inputs hold by a capture, or eagerly where that may be."""
        try:
            return self._runner.replay(self._entry(mode, rows)), mode
        except (CaptureFailed, BudgetBelowCapture) as error:
            self._refuse(mode, rows, error)
        return self._runner.eager(self._inputs.first(rows), rows), "eager"

    def _entry(self, mode: Mode, rows: int) -> Entry:
        make = partial(self._runner.capture, mode, rows)
        return self._store.get((mode, rows), make, f"{mode} of {rows} rows")

    def _refuse(self, mode: Mode, rows: int, error: CaptureFailed | BudgetBelowCapture) -> None:
        """Remember that a capture failed; raises it unless such batches may run eagerly."""
        if not self._falls_back:
            raise error
        self._failures += 1
        self._chooser.refused[mode, rows] = f"{type(error).__name__} at {rows} rows"
        _log.warning("batches of up to %d rows lose %s mode: %s", rows, mode, error)

    @contextmanager
    def _used_by(self, call: str) -> Iterator[None]:
        """One call at a time, in inference mode, and not while a graph is captured."""
        refuse_under_capture(
            self.device, f"GraphPool.{call}() was called",
            "A pool captures by itself: call it outside, or put the step's functions there.",
        )  # fmt: skip
        if not self._lock.acquire(blocking=False):
            raise PoolInUse(user=self._user)
        try:
            self._user = f"{call}() of thread {threading.current_thread().name}"
            if self._is_closed:
                raise PoolClosed()
            with torch.inference_mode():
                yield
        finally:
            self._lock.release()


def driver_of(device: torch.device) -> GraphDriver:
    """CUDA graphs, or the twin of the host."""
    return CudaDriver(device) if device.type == "cuda" else HostDriver()
