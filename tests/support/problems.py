"""Problems and plans by keywords, as tests like to have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warploom.scheduler.model.layout import Records
from warploom.scheduler.model.problem import Problem
from warploom.scheduler.plans.capacity import Capacity
from warploom.scheduler.plans.plan import Plan, make_plan


def problem_of(
    segments: Records, *, num_ctas: int, sm_limit: int | None = None, **numbers: Any
) -> Problem:
    """The problem for all CTAs, or for those of a limit, of which there may be more than CTAs."""
    active = num_ctas if sm_limit is None else min(sm_limit, num_ctas)
    return Problem(segments, num_ctas=num_ctas, active_ctas=active, **numbers)


def plan_of(
    segments: Records, *, capacity: Capacity | None = None, indices: Any = None, **numbers: Any
) -> Plan:
    """One that fits the capacity, if there is one."""
    plan = make_plan(problem_of(segments, **numbers), indices)
    if capacity is not None:
        capacity.bounds.admit(segments, len(plan.indices))
        plan.check_fits(capacity)
    return plan


def of_problem(plan: Plan, **changes: Any) -> Plan:
    """A plan that says it was made for another problem."""
    return replace(plan, problem=replace(plan.problem, **changes))
