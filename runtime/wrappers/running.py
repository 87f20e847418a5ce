"""`AttentionWrapper.run` for tensors that differ from the previous run's in more than addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from warploom.dsl.values.stand_ins import unwatched
from warploom.runtime.declaring.declare import checked_flag
from warploom.runtime.devices.graph import refuse_stale_plans
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.inputs.args import (
    KV,
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
from warploom.runtime.inputs.missing import refuse_absent
from warploom.runtime.inputs.outputs import check_run_apart
from warploom.runtime.launching.launch import Run
from warploom.runtime.operators import custom_op
from warploom.runtime.operators.custom_op import Result, Runner
from warploom.runtime.tensors.plain import needs_operator
from warploom.runtime.tensors.strides import new_result
from warploom.runtime.tensors.tensors import as_seen, as_torch
from warploom.runtime.wrappers.guard import Guard
from warploom.runtime.wrappers.planning import Planning
from warploom.runtime.wrappers.reference import run_reference, unread_values


class Running(Planning):
    """The part of a wrapper that checks the tensors of a run; `run` itself has a fast path."""

    handle: int
    recorded: tuple[str, ...]
    sm_scale: float
    _guard: Guard
    _lse_scale: float
    _keeps_plans: bool  # captured launches see later plans, or there are no later plans

    def _run_with_aux(
        self, q: Any, kv: Any, out: Any, lse: Any, max_scores: Any, return_lse: bool,
        return_aux: Requested | None, inputs: dict[str, Any],
    ) -> Result | tuple[torch.Tensor, AuxOutput]:  # fmt: skip
        """A run with `return_aux` or `max_scores`, or one under torch.compile."""
        self._refuse_absent(q, kv, inputs)
        asked = AuxRequest(return_lse)
        if return_aux is not None:
            asked = checked_request(return_aux, return_lse)
        wanted = MaxScores(max_scores) if asked.max_scores or max_scores is not None else None
        runner = cast(Runner, self)
        result: Result
        if is_dynamo_compiling():
            learnt = self._learnt(inputs)
            # kept tensors are passed, too, so that torch orders this read with writes to them
            inputs = {**self._inputs.for_runs(), **inputs}
            result = custom_op.compiled_run(
                runner, q, kv, out, lse, asked.lse, inputs, learnt, wanted
            )
        elif wanted is None:
            result = runner.run(q, kv, out=out, lse=lse, return_lse=asked.lse, **inputs)
        else:
            check_is_declared(self.spec)
            result = self._run_unknown(q, kv, out, lse, asked.lse, inputs, wanted)
        if return_aux is None:
            return result
        return with_aux(result, wanted if asked.max_scores else None)

    def _run_unknown(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any],
        max_scores: MaxScores | None = None,
    ) -> Result:  # fmt: skip
        """Check all arguments, and call the custom operator if torch must know of the call."""
        self._refuse_absent(q, kv, inputs)
        inputs = self._inputs.read(inputs)
        return_lse = checked_flag("return_lse", return_lse)
        batch = self._batch
        if batch is None:
            raise self._not_planned()
        parts = kv if isinstance(kv, (tuple, list)) else (kv,)
        tops = None if max_scores is None else max_scores.tensor
        if needs_operator("run", (q, *parts, out, lse, tops, *inputs.values())):
            return self._run_operator(q, kv, out, lse, return_lse, inputs, max_scores)
        kv = checked_kv(kv, self.kv_format)
        q = as_torch(q, "q")
        out = out if out is None else as_torch(out, "out", shared=True)
        lse = lse if lse is None else as_torch(lse, "lse", shared=True)
        if max_scores is not None and tops is not None:
            max_scores.tensor = tops = as_torch(tops, "max_scores", shared=True)
        learnt, tensors = self._learnt(inputs), (q, *key_value(kv))
        is_traced, wants = torch.compiler.is_compiling(), learnt or custom_op.wanting(tensors)
        if wants and not is_traced:
            check_results(out, lse, tensors, self._geometry, self._with_rows(batch, q), tops)
            inputs = {name: self._inputs.seen(name, value) for name, value in inputs.items()}
        if wants or is_traced:  # the operator raises NoGradient when a gradient is requested
            return custom_op.compiled_run(
                cast(Runner, self), q, kv, out, lse, return_lse, inputs, learnt, max_scores
            )
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            with unwatched():
                return self._admit_and_launch(q, kv, out, lse, return_lse, inputs, max_scores)
        finally:
            held.leave()

    def _refuse_absent(self, q: Any, kv: Any, inputs: Mapping[str, Any]) -> None:
        """Raise WrongCall if q or kv is not given."""
        if q is ... or kv is ...:
            traced = self.spec.variant
            known = {*traced.input_names, *traced.unread}
            refuse_absent(type(self).__name__, q, kv, inputs, known)

    def _check_run(self, q: torch.Tensor, kv: Any, inputs: dict[str, Any]) -> None:
        """Raise what `run` would raise, without a launch, for callers that must check ahead."""
        batch = self._batch
        if batch is None:
            raise self._not_planned()
        check_query(q, self._geometry, self._with_rows(batch, q))
        keys, values = key_value(checked_kv(kv, self.kv_format))
        check_key_values(keys, values, self._geometry, batch)
        self._inputs.check_given(self._inputs.read(inputs))

    def _run_operator(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any],
        max_scores: MaxScores | None,
    ) -> Result:  # fmt: skip
        """Let torch dispatch the call: as an operator in a graph, with fake tensors, ..."""
        if isinstance(kv, (tuple, list)) and len(kv) == 2:
            kv = as_seen(kv[0], "k"), as_seen(kv[1], "v")
        elif not isinstance(kv, torch.Tensor):
            kv = checked_kv(kv, self.kv_format)
        inputs = {name: self._inputs.seen(name, value) for name, value in inputs.items()}
        return custom_op.compiled_run(
            cast(Runner, self), as_seen(q, "q"), kv, out, lse, return_lse, inputs,
            self._learnt(inputs), max_scores,
        )  # fmt: skip

    def _admit_and_launch(
        self,
        q: torch.Tensor,
        kv: KV,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        inputs: dict[str, Any],
        max_scores: MaxScores | None,
    ) -> Result:
        """Run; the calling thread holds the guard, so the plan does not change meanwhile."""
        batch = self._batch
        if batch is None or self._is_refused:  # by a plan of another thread, or an interrupted one
            raise self._not_planned()
        if not self._keeps_plans:
            refuse_stale_plans()
        if self._launcher is not None:
            fitting = self._with_rows(batch, q)
            if fitting is not batch and self.planned is not None:
                self._launcher.planned(fitting, self.planned.kernel)
                self._batch = fitting
            return self._launcher.start(Run(q, kv, out, lse, return_lse, inputs), max_scores)
        tensors = (q, *key_value(kv))
        tops = None if max_scores is None else max_scores.tensor
        check_results(out, lse, tensors, self._geometry, batch, tops)
        values = unread_values(self._variant, self.spec.variant.unread, self._geometry, batch)
        values |= {**self._inputs.scalars, **self._inputs.tensors}
        given = self._inputs.check_given(inputs)
        values |= given
        written = {"out": out, "lse": lse, "max_scores": tops}
        read = dict(zip("qkv", tensors, strict=True))
        check_run_apart(self.recorded, self._inputs.tensors, given, read, written)
        o, sums, found = run_reference(
            self._variant, batch.on_host, self._geometry, tensors, values, self.sm_scale
        )
        if max_scores is not None:
            max_scores.put(found)
        if out is None:
            o = new_result(q, self._geometry.head_dim_v).copy_(o)
        return custom_op.results(o, sums * self._lse_scale, out, lse, return_lse)

    def _with_rows(self, batch: Batch, q: torch.Tensor) -> Batch:
        """The planned batch; for CUDA graphs with q's row count, if that is the bounds' maximum.

        A graph is captured with the most rows of its batches. Rows of no request are not touched.
        """
        bounds, rows = self._bounds, len(q) if q.ndim else 0
        planned = self.planned  # read once, since another thread may set it to None
        if rows == batch.q_rows or planned is None or isinstance(batch, OnDevice):
            return batch
        if rows == planned.batch.q_rows:
            return planned.batch
        is_graphs = self._keeps_plans and not self._geometry.batched
        if is_graphs and bounds is not None and rows == bounds.max_q_rows:
            return replace(batch, q_rows=rows)
        return planned.batch  # q does not fit this batch, and checks will say so

    def _learnt(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Values of fields, kept or given to a run, whose gradient may be requested."""
        learnt = self._inputs.learnt
        values = {**learnt, **inputs} if learnt else inputs
        return custom_op.wanting(x for name, x in values.items() if name not in self.recorded)
