"""`plan` of `AttentionWrapper`: what a new batch changes."""

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
    """Have none after a call that nothing was planned of, unless another thread has the turn."""
    held = wrapper._guard
    if not held.is_mine() and held.try_enter(False):
        try:
            wrapper._forget()
        finally:
            held.leave()


class Planning(Uncopied, Shown):
    """The part of a wrapper that plans; the wrapper's constructor makes the rest."""

    device: torch.device
    backend: Backend
    kv_format: KVFormat
    heads: Heads
    spec: AttentionSpec
    planned: Planned | None
    _is_refused = False  # the last plan
    _asks_planner_alone = False  # nothing else looks at a batch before it is planned
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

        Whatever it raises, but InUse, there is no plan afterwards, so that `run`
        cannot serve the batch before in place of this one: a misspelt or unfit input, too, asks for
        another plan. Values of earlier plans stay, and those of the refused call are not kept.
        Memory stays where it is, and what a CUDA graph holds may be replayed.

        Index arrays may be lists, NumPy arrays, or tensors of any DLPack producer. With declared
        bounds and int32 tensors on the wrapper's device, a kernel on the current stream plans
        (`runtime.strategies.planner` says when): nothing waits, and a CUDA graph can hold plan
        and run. It does not compare pages and ragged keys with k and v, so a page beyond the
        cache, which only `run` gets to see, is read past its end. For what the device refuses
        see `check_plan`: runs of such a plan compute nothing and leave `out` and `lse` as they
        were, and new ones uninitialised.
        Page numbers may always lie on the device, where those of a plan by the host are not checked
        at all; other arrays there are copied to the host if the host must plan, which waits for the
        device. All of them are copied by the plan (by each replay of one that a graph
        holds): what is written to them later, no run sees.

        Args:
            qo_indptr: int32 [requests + 1], where each request's query rows begin.
            kv_indptr: int32; dense and ragged: [requests + 1] in tokens; rolling: likewise, of
                whole sequences; paged: [requests + 1] in pages; block-sparse: [block rows of all
                requests + 1] in blocks.
            kv_indices: int32, pages or column blocks; indexed formats only. It may have
                more than kv_indptr[-1] entries: what lies behind is not read.
            last_page_len: int32 [requests], tokens in each last page; paged only.
            kv_lens: int32 [requests], keys of each request; block-sparse only.
            q_rows: rows that q will have, if the device plans; the most that the bounds allow by
                default. (Plans of the host need none: with `cuda_graph` runs take a q of the
                batch's rows or, where it is not dense and the back end not the reference, of all
                that the bounds allow. What lies behind the batch's in `out` and `lse` stays.)
            **inputs: values of the variant's fields, which stay for later plans until they are
                given again; those given to `run` hold for that run alone. Scalars of the mask are
                fixed here. A tensor of the mask given on the host, here or to the variant, is
                copied, and its values sharpen the plan; it is read again by each plan, and by no
                run. One that only `run` is given leaves the plan right, but nothing is skipped for
                what it holds; `check_lengths` sees it in that run, and on the CPU alone. A device
                plans with all that the mask reads.

        Runs wait for this plan, and it waits for runs, on whichever streams they are. Replays of a
        captured run are seen by nobody: replay on the stream of `plan`, or order the two.

        Raises:
            BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType: a wrong index array.
            UnknownInput, WrongDevice: a wrong input.
            ArgumentError: rows of a rolling cache have overwritten what the first of them sees, or
                another argument is not taken.
            MissingInput: a scalar of the mask has no value, or the device plans and a tensor has
                none.
            FrozenByGraph: with `cuda_graph`, an input that captured launches could not see.
            BoundsExceeded, WorkspaceTooSmall: the batch does not fit.
            PlanInvalid: WARPLOOM_VERIFY_PLANS is set, and warploom has made a mistake.
            ForbiddenUnderCapture: the current stream is being captured, and the host must plan.
            InUse: another thread runs or plans this wrapper; the plan before stays.
        """
        held = self._guard
        held.enter_plan()
        try:
            self._begin_plan()
            given = Arguments(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens, q_rows)
            is_plain = self._asks_planner_alone and not inputs and not is_watched()
            if not is_plain or not self._plan_again(given):
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

        The output of runs in between is undefined: such a plan computes nothing.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            NotReplayed: a CUDA graph holds the plan, and no replay has made one.
            BatchRefused: an index array was wrong or passed the bounds.
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
            NotTraced: kernels tell no times.
            Those of `check_plan` and `Planner.stamps`.
            InUse: another thread plans.
        """
        if self.backend == "reference":
            reason = "is 'reference', which runs no kernels; leave it out for those of the device"
            raise ArgumentError(name="backend", reason=reason)
        if not self._planner.rules.spec.stamps:  # planning it would not help
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
        """The tile of the last plan, with what spoke for it; None before, and for the reference."""
        if self._launcher is None or self.planned is None:
            return None
        return self.planned.choice

    @property
    def scalars(self) -> dict[str, Any]:
        """Values of the variant's scalars that are kept, by plans or by the variant."""
        return dict(self._inputs.scalars)

    @property
    def program(self) -> Program | None:
        """What runs of the last plan launch, and why; None before, and for the reference."""
        if self._launcher is None or self._launcher.program is None or self.planned is None:
            return None
        return self._launcher.program.with_choice(self.choice)

    def why_roles(self) -> str | None:
        """Why the last batch has two roles or not, if it could be mixed; see `why_roles.py`."""
        if self.backend != "cuda" or self.planned is None:
            return None
        return why_roles(self._planner.rules, self.planned, self._inputs)

    def _plan(self, batch: Batch, inputs: dict[str, Any]) -> None:
        # whoever counts a batch without its arrays has asked
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

    def _plan_again(self, given: Arguments) -> bool:
        """Plan a batch like the last one in few calls; False if it is none."""
        planned = self._planner.again(given)
        if planned is None:
            return False
        assert self._launcher is not None  # of what the planner has planned before
        if self._planner.verifies:
            self._planner.verify(planned, self._inputs)
        self._inputs.for_batch(planned.batch)
        self._launcher.planned_again(planned.batch)
        self.planned, self._batch = planned, planned.batch
        self._is_refused = False
        return True

    def _nobody_looks(self) -> bool:
        """Whether only the planner asks about a batch, as long as inputs stay."""
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

        The last batch stays, since calls of other threads that look at it are told who plans.
        """
        if self._launcher is not None:  # first, since runs that it knows ask it alone
            self._launcher.forget()
        self._is_refused = True

    def _forget(self) -> None:
        """Have no plan: the last one was refused."""
        self._begin_plan()
        self._batch = self.planned = None
        self._asks_planner_alone = False

    def _not_planned(self) -> NotPlanned:
        if not self._is_refused:
            return NotPlanned()
        return NotPlanned(what="the last plan() was refused, or interrupted")

    def _lengths_check(self, batch: Batch) -> LengthsCheck | None:
        """What the variant has to say of a batch that the host knows; None if nothing."""
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
            self._inputs.keep(offer)  # a graph may read these: only what fits goes there
        if self._launcher is not None:
            self.planned = self._planner.plan(batch, self._inputs)
            if self._planner.verifies:
                self._planner.verify(self.planned, self._inputs)
            self._launcher.planned(self.planned.batch, self.planned.kernel)
