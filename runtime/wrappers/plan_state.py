"""The plan that the calls of a wrapper find, and who may change it."""

from __future__ import annotations

from warploom.errors import NotPlanned
from warploom.runtime.formats.batch import Batch
from warploom.runtime.launching.launch import Launcher
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.wrappers.guard import Guard


class PlanState:
    """The current plan of a wrapper, behind a guard.

    Attributes:
        guard: held by each call that plans, runs or prefetches.
        batch: what was planned; None before, and after a refused plan.
        planned: its plan on the device; None for the reference, too.
        is_refused: the last call of `plan` failed, or has not come to its end.
        may_replan: nobody but the planner has to read a batch that is like this one.
    """

    def __init__(self, owner: str, launcher: Launcher | None) -> None:
        """Begin without a plan.

        Args:
            owner: name of the wrapper's class, for messages.
            launcher: which launches runs of the plan; none for the reference.
        """
        self.batch: Batch | None = None
        self.planned: Planned | None = None
        self.is_refused = False
        self.may_replan = False
        self._launcher = launcher
        self.guard = Guard(owner, self.forget)

    def begin(self) -> None:
        """Let runs find no plan until there is a new one, even if an interrupt comes meanwhile.

        `batch` stays: a call of another thread that finds it goes on to the guard, which raises
        InUse.
        """
        if self._launcher is not None:  # first: runs with admitted tensors check the launcher only
            self._launcher.forget()
        self.is_refused = True

    def take(self, planned: Planned | None, batch: Batch) -> None:
        """Let runs find a new plan."""
        self.planned, self.batch = planned, batch
        self.is_refused = False

    def forget(self) -> None:
        """Drop the plan, because the last call of `plan` was refused."""
        self.begin()
        self.batch = self.planned = None
        self.may_replan = False

    def lose(self) -> None:
        """Drop the plan after a call of `plan` that does not fit its signature, unless another
        thread holds the guard."""
        held = self.guard
        if not held.is_mine() and held.try_enter(False):
            try:
                self.forget()
            finally:
                held.leave()

    def required(self) -> Batch:
        """The planned batch; raises NotPlanned if there is none."""
        if self.batch is None:
            raise self.not_planned()
        return self.batch

    def not_planned(self) -> NotPlanned:
        """The error of a call that needs a plan."""
        if not self.is_refused:
            return NotPlanned()
        return NotPlanned(what="the last plan() was refused, or interrupted")
