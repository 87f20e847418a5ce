"""`AttentionWrapper.plan`: what changes with a new batch."""

from __future__ import annotations

from functools import partial
from logging import DEBUG
from typing import Any

import torch

from warploom.calls import explained
from warploom.codegen.source import TileChoice
from warploom.counters import count
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.stand_ins import is_watched, uncompiled, unseen
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NotPlanned, NotTraced
from warploom.logs import log
from warploom.runtime.devices.device import Backend
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Batch, HostBatch, OnDevice
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.lengths import LengthsCheck
from warploom.runtime.inputs.offer import NOTHING
from warploom.runtime.launching.launch import Launcher
from warploom.runtime.launching.program import Program
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.plan_summary import summary
from warploom.runtime.strategies.planner import Planner, as_many_rows
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.uncopied import Uncopied
from warploom.runtime.wrappers.guard import Guard
from warploom.runtime.wrappers.ring_rows import refuse_overwritten
from warploom.runtime.wrappers.shown import Shown
from warploom.runtime.wrappers.why_roles import why_roles
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import Records
from warploom.scheduler.plans.plan import Plan


def lose_plan(wrapper: Planning) -> None:
    """Drop the plan after a refused call of `plan`, unless another thread holds the guard."""
    held = wrapper._guard
    if not held.is_mine() and held.try_enter(False):
        try:
            wrapper._forget()
        finally:
            held.leave()


class Planning(Uncopied, Shown):
    """The part of a wrapper that plans; the wrapper's constructor sets the attributes."""

    device: torch.device
    backend: Backend
    kv_format: KVFormat
    heads: Heads
    spec: AttentionSpec
    planned: Planned | None
    _is_refused = False  # the last call of `plan` failed
    _asks_planner_alone = False  # only the planner reads a batch before it is planned
    _bounds: Bounds | None
    _batch: Batch | None
    _geometry: Geometry
    _guard: Guard
    _inputs: Inputs
    _variant: Variant
    _planner: Planner
    _launcher: Launcher | None  # none for the reference

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
        """Distribute the work of a batch, on the host or on the device.

        After any error except InUse there is no plan, so that `run` cannot serve the previous batch
        in place of this one; this includes a misspelt or wrong input. Input values of earlier plans
        stay, and those of the refused call are not kept. Memory stays where it is, and launches
        that a CUDA graph holds may be replayed.

        Index arrays may be lists, NumPy arrays, or tensors of any DLPack producer. With declared
        bounds and int32 tensors on the wrapper's device, a kernel on the current stream plans
        (`runtime.strategies.planner` says when): nothing waits, and a CUDA graph can hold plan
        and run. Where prefills and decodes have tiles of their own, its plan may differ from the
        host's (decision 0062), and with it the last bits of outputs. This kernel does not compare
        page numbers and ragged keys with k and v, since only `run` gets the cache: a page number
        beyond the cache makes `run` read past its end. If the device refuses a batch, `check_plan`
        reports it; runs of such a plan compute nothing, leave `out` and `lse` as they were, and
        return new tensors uninitialised.
        Page numbers may always be on the device; if the host plans, these are not checked at all.
        Other device arrays are copied to the host if the host must plan, which waits for the
        device. A plan copies all index arrays (a captured plan does so at each replay): runs do not
        see what is written to the caller's arrays later.

        Args:
            qo_indptr: int32 [requests + 1], where each request's query rows begin.
            kv_indptr: int32; dense and ragged: [requests + 1] in tokens; rolling: [requests + 1] in
                tokens of whole sequences; paged: [requests + 1] in pages; block-sparse: [block rows
                of all requests + 1] in blocks.
            kv_indices: int32, pages or column blocks; indexed formats only. Entries from
                kv_indptr[-1] on are not read.
            last_page_len: int32 [requests], tokens in each last page; paged only.
            kv_lens: int32 [requests], keys of each request; block-sparse only.
            q_rows: number of rows that q will have, if the device plans; by default the most that
                the bounds allow. (A plan by the host does not need it: with `cuda_graph`, runs take
                a q with the batch's rows or, if the format is not dense and the back end is not the
                reference, with the most rows that the bounds allow. Rows of `out` and `lse` behind
                the batch's rows are not written.)
            **inputs: values of the variant's fields. They stay for later plans until they are given
                again; values given to `run` hold for that run only. Scalars of the mask are fixed
                here. A tensor of the mask that is given on the host, here or to the variant, is
                copied, and the planner uses its values to skip tiles; each plan reads it again, and
                no run does. If only `run` gets such a tensor, the plan is still correct, but skips
                no tiles because of its values; `check_lengths` then sees it in that run, and only
                on the CPU. A plan by the device needs all values that the mask reads.

        Runs wait for this plan, and it waits for earlier runs, on any streams. Replays of captured
        runs are not tracked: replay on the stream of `plan`, or order the two.

        Raises:
            BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType: a wrong index array.
            UnknownInput, WrongDevice: a wrong input.
            ArgumentError: later rows of a step have overwritten keys of a rolling cache that its
                first row sees, or another argument is not accepted.
            MissingInput: a scalar of the mask has no value, or the device plans and a tensor of the
                mask has none.
            FrozenByGraph: with `cuda_graph`, an input that captured launches could not see.
            BoundsExceeded, WorkspaceTooSmall: the batch does not fit.
            PlanInvalid: WARPLOOM_VERIFY_PLANS is set, and warploom has made a wrong plan.
            ForbiddenUnderCapture: the current stream is being captured, and the host must plan.
            InUse: another thread runs or plans this wrapper; the previous plan stays.
        """
        held = self._guard
        held.enter_plan()
        try:
            self._begin_plan()
            given = Arguments(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens, q_rows)
            is_plain = self._asks_planner_alone and not inputs and not is_watched()
            if not is_plain or not self._replan(given):
                self._plan_anew(given, inputs)
            self._count()
        except BaseException:
            self._forget()
            raise
        finally:
            held.leave_plan()

    @unseen
    def _plan_anew(self, given: Arguments, inputs: dict[str, Any]) -> None:
        """Plan any batch."""
        if inputs:
            inputs = self._inputs.read(inputs)
        self._plan(self._lowered(given), inputs)

    def _lowered(self, given: Arguments) -> Batch:
        """Check the arguments of `plan`; see `Planner.read`."""
        if self.backend != "reference":
            return self._planner.read(given)
        refuse_under_capture(self.device, "plan() was called", "Call it before or after.")
        return as_many_rows(make_batch(self.kv_format, *given[:5]), given.q_rows)

    def check_plan(self) -> None:
        """Raise if the device refused the last plan; waits for the device.

        Runs of a refused plan compute nothing, so their output is undefined.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            NotReplayed: a CUDA graph holds the plan, and no replay has made one.
            BatchRefused: an index array was wrong or exceeded the bounds.
            ForbiddenUnderCapture: the current stream is being captured.
        """
        if self._batch is None:
            raise self._not_planned()
        if isinstance(self._batch, OnDevice):
            self._planner.check_status()

    def stamps(self) -> tuple[Plan, Records]:
        """The last plan and when its work items ran, for `wl.trace`; see `Planner.stamps`.

        Raises:
            ArgumentError: the back end is the reference, which runs no kernels.
            NotTraced: the kernels record no times.
            Those of `check_plan` and `Planner.stamps`.
            InUse: another thread plans.
        """
        if self.backend == "reference":
            reason = "is 'reference', which runs no kernels; leave it out for those of the device"
            raise ArgumentError(name="backend", reason=reason)
        if not self._planner.rules.spec.stamps:  # a plan would not help, so this comes first
            raise NotTraced
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            self.check_plan()
            assert self.planned is not None
            return self._planner.stamps(self.planned)
        finally:
            held.leave()

    @property
    def choice(self) -> TileChoice | None:
        """The tile of the last plan with the reason for it; None before, and for the reference."""
        if self._launcher is None or self.planned is None:
            return None
        return self.planned.choice

    @property
    def scalars(self) -> dict[str, Any]:
        """Values of the variant's scalars that plans or the variant have set."""
        return dict(self._inputs.scalars)

    @property
    def program(self) -> Program | None:
        """The launches of a run of the last plan, and why; None before, and for the reference."""
        if self._launcher is None or self._launcher.program is None or self.planned is None:
            return None
        return self._launcher.program.with_choice(self.choice)

    def why_roles(self) -> str | None:
        """Why the last batch, if it could be mixed, has two roles or one tile (`why_roles.py`)."""
        if self.backend != "cuda" or self.planned is None:
            return None
        return why_roles(self._planner.rules, self.planned, self._inputs)

    def _plan(self, batch: Batch, inputs: dict[str, Any]) -> None:
        # a batch without host arrays was checked against the bounds when it was counted
        if self._bounds is not None and isinstance(batch, HostBatch):
            self._bounds.admit(batch.segments, len(batch.indices))
        rewritten = self._inputs.rewritten()
        if rewritten:
            inputs = rewritten | inputs
        self._take(batch, inputs)
        self._batch = batch if self.planned is None else self.planned.batch
        self._is_refused = False
        if inputs or not self._asks_planner_alone:
            self._asks_planner_alone = self._nobody_looks()

    def _replan(self, given: Arguments) -> bool:
        """Plan a batch like the last one by a short way; False if the batch is not like it."""
        planned = self._planner.replan(given)
        if planned is None:
            return False
        assert self._launcher is not None  # a back end that has a planner has a launcher
        if self._planner.verifies:
            self._planner.verify(planned, self._inputs)
        self._inputs.for_batch(planned.batch)
        self._launcher.replanned(planned.batch)
        self.planned, self._batch = planned, planned.batch
        self._is_refused = False
        return True

    def _nobody_looks(self) -> bool:
        """Whether only the planner reads a batch, as long as inputs do not change."""
        return not (
            self._launcher is None
            or self._variant.checks_lengths
            or self._geometry.format.ring is not None
            or self._inputs.follow_batches
        )

    def _count(self) -> None:
        count("plans")
        if log.isEnabledFor(DEBUG):
            self._log()

    @unseen
    def _log(self) -> None:
        assert self._batch is not None  # just planned
        line = summary(self._batch, self.planned, self.choice, self.device.type == "cpu")
        log.debug("planned %s, %s: %s", self._variant.name, self.kv_format, line)

    def _begin_plan(self) -> None:
        """Let runs find no plan until there is a new one, even if an interrupt comes meanwhile.

        `_batch` stays: a call of another thread that finds it goes on to the guard, which raises
        InUse.
        """
        if self._launcher is not None:  # first: runs with admitted tensors check the launcher only
            self._launcher.forget()
        self._is_refused = True

    def _forget(self) -> None:
        """Drop the plan, because the last call of `plan` was refused."""
        self._begin_plan()
        self._batch = self.planned = None
        self._asks_planner_alone = False

    def _not_planned(self) -> NotPlanned:
        if not self._is_refused:
            return NotPlanned()
        return NotPlanned(what="the last plan() was refused, or interrupted")

    def _lengths_check(self, batch: Batch) -> LengthsCheck | None:
        """The variant's check of a batch whose lengths the host knows; None if it has no check."""
        if isinstance(batch, OnDevice) or not self._variant.checks_lengths:
            return None
        return LengthsCheck(self._variant, batch, self._inputs.mask_tensors)

    def _take(self, batch: Batch, inputs: dict[str, Any]) -> None:
        if self._launcher is not None:
            self._launcher.before_plan()
        offer = self._inputs.offer(inputs) if inputs else NOTHING
        lengths = self._lengths_check(batch)
        self._inputs.for_batch(batch, lengths)
        known = self._inputs.check_planned(offer)
        if lengths is not None:
            lengths.of_plan(known)
        if (ring := self._geometry.format.ring) is not None:
            scalars = {**self._inputs.scalars, **offer.scalars}
            refuse_overwritten(ring, self.spec.variant, batch.on_host, scalars, known, self.heads)
        if inputs:
            self._inputs.keep(offer)  # after the checks, since a graph may read the kept tensors
        if self._launcher is not None:
            self.planned = self._planner.plan(batch, self._inputs)
            if self._planner.verifies:
                self._planner.verify(self.planned, self._inputs)
            self._launcher.planned(self.planned.batch, self.planned.kernel)
