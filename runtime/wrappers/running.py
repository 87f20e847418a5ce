"""What `run` does: launch at once, or check all tensors, or go through torch's operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from warploom.dsl.values.stand_ins import unwatched
from warploom.runtime.declaring.declare import checked_flag
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.devices.graph import refuse_stale_plans
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.inputs.args import (
    Geometry,
    check_key_values,
    check_query,
    check_results,
    checked_kv,
    key_value,
)
from warploom.runtime.inputs.aux_outputs import (
    AuxOutput,
    AuxRequest,
    MaxScores,
    Requested,
    check_is_declared,
    checked_request,
    with_aux,
)
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.missing import refuse_absent
from warploom.runtime.launching.launch import Run
from warploom.runtime.operators import custom_op
from warploom.runtime.operators.custom_op import Result
from warploom.runtime.tensors.plain import needs_operator
from warploom.runtime.tensors.tensors import as_seen, as_torch
from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.runtime.wrappers.reference import Reference
from warploom.runtime.wrappers.selected_pages import SelectedPages


class Runner:
    """Runs the planned batches of one wrapper.

    Attributes:
        handle: number under which the custom operator finds the wrapper.
        recorded: names of the outputs that the variant records values in.
    """

    def __init__(
        self,
        declared: DeclaredAttention,
        geometry: Geometry,
        inputs: Inputs,
        state: PlanState,
        compiled: Compiled | None,
        selected: SelectedPages | None,
        handle: int,
        owner: str,
        keeps_plans: bool,
    ) -> None:
        """Begin without admitted tensors.

        Args:
            declared: the wrapper's declaration.
            geometry: what tensors must agree with.
            inputs: values of the variant's fields.
            state: which has the plan.
            compiled: what launches; None for the reference.
            selected: pages that a tensor names; on the CPU each run checks them.
            handle: the attribute.
            owner: name of the wrapper's class, for messages.
            keeps_plans: captured launches see later plans, or there are no later plans.
        """
        self._spec, self._bounds = declared.spec, declared.options.bounds
        self._geometry, self._inputs, self._state = geometry, inputs, state
        self._guard = state.guard
        self._launcher = None if compiled is None else compiled.launcher
        self._reference = Reference(declared, geometry, inputs)
        self._checked = selected if geometry.device.type == "cpu" else None
        self._owner, self._keeps_plans = owner, keeps_plans
        self.handle = handle
        self.recorded = declared.spec.variant.output_names

    def run(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any]
    ) -> Result:
        """A run outside of torch.compile; `AttentionWrapper.run` documents it."""
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            launcher = self._launcher
            if (
                launcher is not None
                and launcher.is_admitted(q, kv, out, lse, return_lse)
                and not ((inputs or self._inputs.learnt) and self.learnt(inputs))
            ):
                return launcher.launch(q, kv, out, lse, return_lse, inputs)
        finally:
            held.leave()
            del held
        return self._run_unknown(q, kv, out, lse, return_lse, inputs)

    def run_with_aux(
        self, q: Any, kv: Any, out: Any, lse: Any, max_scores: Any, return_lse: bool,
        return_aux: Requested | None, inputs: dict[str, Any],
    ) -> Result | tuple[torch.Tensor, AuxOutput]:  # fmt: skip
        """A run with `return_aux` or `max_scores`, or one under torch.compile."""
        self._refuse_absent(q, kv, inputs)
        asked = AuxRequest(return_lse)
        if return_aux is not None:
            asked = checked_request(return_aux, return_lse)
        wanted = MaxScores(max_scores) if asked.max_scores or max_scores is not None else None
        result: Result
        if is_dynamo_compiling():
            learnt = self.learnt(inputs)
            # kept tensors are passed, too, so that torch orders this read with writes to them
            inputs = {**self._inputs.for_runs(), **inputs}
            result = custom_op.compiled_run(
                self, q, kv, out, lse, asked.lse, inputs, learnt, wanted
            )
        elif wanted is None:
            result = self.run(q, kv, out, lse, asked.lse, inputs)
        else:
            check_is_declared(self._spec)
            result = self._run_unknown(q, kv, out, lse, asked.lse, inputs, wanted)
        if return_aux is None:
            return result
        return with_aux(result, wanted if asked.max_scores else None)

    def check(self, q: torch.Tensor, kv: Any, inputs: dict[str, Any]) -> None:
        """Raise what `run` would raise, without a launch."""
        batch = self._state.required()
        check_query(q, self._geometry, self._with_rows(batch, q))
        keys, values = key_value(checked_kv(kv, self._geometry.kv_format))
        check_key_values(keys, values, self._geometry, batch)
        self._inputs.check_given(self._inputs.read(inputs))

    def learnt(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Values of fields, kept or given to a run, whose gradient may be requested."""
        learnt = self._inputs.learnt
        values = {**learnt, **inputs} if learnt else inputs
        return custom_op.wanting(x for name, x in values.items() if name not in self.recorded)

    def _run_unknown(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any],
        max_scores: MaxScores | None = None,
    ) -> Result:  # fmt: skip
        """Check all arguments, and call the custom operator if torch must know of the call."""
        self._refuse_absent(q, kv, inputs)
        inputs = self._inputs.read(inputs)
        return_lse = checked_flag("return_lse", return_lse)
        batch = self._state.required()
        parts = kv if isinstance(kv, (tuple, list)) else (kv,)
        tops = None if max_scores is None else max_scores.tensor
        if needs_operator("run", (q, *parts, out, lse, tops, *inputs.values())):
            return self._run_operator(q, kv, out, lse, return_lse, inputs, max_scores)
        kv = checked_kv(kv, self._geometry.kv_format)
        q = as_torch(q, "q")
        out = out if out is None else as_torch(out, "out", shared=True)
        lse = lse if lse is None else as_torch(lse, "lse", shared=True)
        if max_scores is not None and tops is not None:
            max_scores.tensor = tops = as_torch(tops, "max_scores", shared=True)
        learnt, tensors = self.learnt(inputs), (q, *key_value(kv))
        is_traced, wants = torch.compiler.is_compiling(), learnt or custom_op.wanting(tensors)
        if wants and not is_traced:
            check_results(out, lse, tensors, self._geometry, self._with_rows(batch, q), tops)
            inputs = {name: self._inputs.seen(name, value) for name, value in inputs.items()}
        if wants or is_traced:  # the operator raises NoGradient when a gradient is requested
            return custom_op.compiled_run(
                self, q, kv, out, lse, return_lse, inputs, learnt, max_scores
            )
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            with unwatched():
                return self._start(Run(q, kv, out, lse, return_lse, inputs), max_scores)
        finally:
            held.leave()

    def _refuse_absent(self, q: Any, kv: Any, inputs: Mapping[str, Any]) -> None:
        """Raise WrongCall if q or kv is not given."""
        if q is ... or kv is ...:
            traced = self._spec.variant
            refuse_absent(self._owner, q, kv, inputs, {*traced.input_names, *traced.unread})

    def _run_operator(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any],
        max_scores: MaxScores | None,
    ) -> Result:  # fmt: skip
        """Let torch dispatch the call: as an operator in a graph, with fake tensors, ..."""
        if isinstance(kv, (tuple, list)) and len(kv) == 2:
            kv = as_seen(kv[0], "k"), as_seen(kv[1], "v")
        elif not isinstance(kv, torch.Tensor):
            kv = checked_kv(kv, self._geometry.kv_format)
        inputs = {name: self._inputs.seen(name, value) for name, value in inputs.items()}
        return custom_op.compiled_run(
            self, as_seen(q, "q"), kv, out, lse, return_lse, inputs, self.learnt(inputs), max_scores
        )

    def _start(self, run: Run, max_scores: MaxScores | None) -> Result:
        """Run; the calling thread holds the guard, so the plan does not change meanwhile."""
        state = self._state
        batch = state.required()
        if state.is_refused:  # by a plan of another thread, or an interrupted one
            raise state.not_planned()
        if not self._keeps_plans:
            refuse_stale_plans()
        if self._checked is not None:
            self._checked.check(run.kv)
        launcher = self._launcher
        if launcher is None:
            return self._reference.start(run, batch, max_scores)
        fitting = self._with_rows(batch, run.q)
        if fitting is not batch and state.planned is not None:
            launcher.planned(fitting, state.planned.kernel)
            state.batch = fitting
        if self._checked is None:
            return launcher.start(run, max_scores)
        try:
            return launcher.start(run, max_scores)
        finally:
            launcher.forget()  # so that the next run is checked, too

    def _with_rows(self, batch: Batch, q: torch.Tensor) -> Batch:
        """The planned batch; for CUDA graphs with q's row count, if that is the bounds' maximum.

        A graph is captured with the most rows of its batches. Rows of no request are not touched.
        """
        bounds, rows = self._bounds, len(q) if q.ndim else 0
        planned = self._state.planned  # read once, since another thread may set it to None
        if rows == batch.q_rows or planned is None or isinstance(batch, OnDevice):
            return batch
        if rows == planned.batch.q_rows:
            return planned.batch
        is_graphs = self._keeps_plans and not self._geometry.batched
        if is_graphs and bounds is not None and rows == bounds.max_q_rows:
            return replace(batch, q_rows=rows)
        return planned.batch  # q does not fit this batch, and checks will say so
