"""What `plan` does with a new batch: check it, plan it, and tell all who depend on it."""

from __future__ import annotations

from logging import DEBUG
from typing import Any, Protocol

from warploom.counters import count
from warploom.dsl.values.stand_ins import is_watched, unseen
from warploom.logs import log
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.devices.graph import refuse_under_capture
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Batch, HostBatch, OnDevice
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.lengths import LengthsCheck
from warploom.runtime.inputs.offer import NOTHING
from warploom.runtime.strategies.plan_summary import summary
from warploom.runtime.strategies.planner import as_many_rows
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.runtime.wrappers.prefetching import PagePrefetcher
from warploom.runtime.wrappers.ring_rows import refuse_overwritten
from warploom.runtime.wrappers.selected_pages import SelectedPages


class Follower(Protocol):
    """What must see each new plan before a run does."""

    @property
    def is_used(self) -> bool:
        """Whether it must; else batches like the last one may be planned without it."""
        ...

    def follow(self, batch: Batch, planned: Planned) -> None:
        """Take a plan of a batch."""
        ...


class BatchPlanner:
    """Plans batches for one wrapper."""

    def __init__(
        self,
        declared: DeclaredAttention,
        geometry: Geometry,
        inputs: Inputs,
        state: PlanState,
        compiled: Compiled | None,
        selected: SelectedPages | None,
        prefetcher: PagePrefetcher,
        lengths_are_checked: bool,
    ) -> None:
        """Begin without a batch.

        Args:
            declared: the wrapper's declaration.
            geometry: what tensors must agree with.
            inputs: values of the variant's fields.
            state: which gets the plans.
            compiled: what plans and launches; None for the reference.
            selected: pages that a tensor names, in place of plans.
            prefetcher: which prefetches pages of the plans.
            lengths_are_checked: the variant's own check of lengths is made elsewhere.
        """
        self._declared, self._geometry = declared, geometry
        self._inputs, self._state = inputs, state
        self._planner = None if compiled is None else compiled.planner
        self._launcher = None if compiled is None else compiled.launcher
        self._selected, self._lengths_are_checked = selected, lengths_are_checked
        self._followers: tuple[Follower, ...] = (prefetcher,)
        if selected is not None:
            self._followers = prefetcher, selected

    def plan(self, given: Arguments, inputs: dict[str, Any]) -> None:
        """Plan a batch; `AttentionWrapper.plan` documents it.

        Args:
            given: index arrays.
            inputs: values of the variant's fields.
        """
        state = self._state
        held = state.guard
        held.enter_plan()
        try:
            state.begin()
            is_plain = state.may_replan and not inputs and not is_watched()
            if not is_plain or not self._replan(given):
                self._plan_anew(given, inputs)
            self._count()
        except BaseException:
            state.forget()
            raise
        finally:
            held.leave_plan()

    def _replan(self, given: Arguments) -> bool:
        """Plan a batch like the last one by a short way; False if the batch is not like it."""
        planner, launcher = self._planner, self._launcher
        assert planner is not None and launcher is not None  # the reference may not replan
        planned = planner.replan(given)
        if planned is None:
            return False
        if planner.verifies:
            planner.verify(planned, self._inputs)
        self._inputs.for_batch(planned.batch)
        launcher.replanned(planned.batch)
        self._state.take(planned, planned.batch)
        return True

    @unseen
    def _plan_anew(self, given: Arguments, inputs: dict[str, Any]) -> None:
        """Plan any batch."""
        if inputs:
            inputs = self._inputs.read(inputs)
        batch = self._read(given)
        bounds = self._declared.options.bounds
        # a batch without host arrays was checked against the bounds when it was counted
        if bounds is not None and isinstance(batch, HostBatch):
            bounds.admit(batch.segments, len(batch.indices))
        rewritten = self._inputs.rewritten()
        if rewritten:
            inputs = rewritten | inputs
        planned = self._plan(batch, inputs)
        state = self._state
        state.take(planned, batch if planned is None else planned.batch)
        if inputs or not state.may_replan:
            state.may_replan = self._nobody_looks()

    def _read(self, given: Arguments) -> Batch:
        """Check index arrays; see `Planner.read`."""
        if self._selected is not None:
            return self._selected.read(given)
        if self._planner is not None:
            return self._planner.read(given)
        refuse_under_capture(self._geometry.device, "plan() was called", "Call it before or after.")
        return as_many_rows(make_batch(self._geometry.kv_format, *given[:5]), given.q_rows)

    def _plan(self, batch: Batch, inputs: dict[str, Any]) -> Planned | None:
        """Check a batch with the inputs, and make its plan; None for the reference."""
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
            traced, heads = self._declared.spec.variant, self._declared.heads
            refuse_overwritten(ring, traced, batch.on_host, scalars, known, heads)
        if inputs:
            self._inputs.keep(offer)  # after the checks, since a graph may read the kept tensors
        if self._planner is None or self._launcher is None:
            return None
        planned = self._planner.plan(batch, self._inputs)
        if self._planner.verifies:
            self._planner.verify(planned, self._inputs)
        self._launcher.planned(planned.batch, planned.kernel)
        for each in self._followers:
            each.follow(batch, planned)
        return planned

    def _lengths_check(self, batch: Batch) -> LengthsCheck | None:
        """The variant's check of a batch whose lengths the host knows; None if there is none."""
        variant = self._declared.variant  # asked each time: what it checks may change
        if isinstance(batch, OnDevice) or self._lengths_are_checked or not variant.checks_lengths:
            return None
        return LengthsCheck(variant, batch, self._inputs.mask_tensors)

    def _nobody_looks(self) -> bool:
        """Whether only the planner reads a batch, as long as inputs do not change."""
        return not (
            self._launcher is None
            or self._declared.variant.checks_lengths
            or self._geometry.format.ring is not None
            or self._inputs.follow_batches
            or any(each.is_used for each in self._followers)
        )

    def _count(self) -> None:
        count("plans")
        if log.isEnabledFor(DEBUG):
            self._log()

    @unseen
    def _log(self) -> None:
        batch, planned, of = self._state.required(), self._state.planned, self._declared
        choice = None if planned is None else planned.choice
        line = summary(batch, planned, choice, of.device.type == "cpu")
        log.debug("planned %s, %s: %s", of.variant.name, of.kv_format, line)
