"""`run` of `AttentionWrapper` with tensors unlike those of the run before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from warploom.runtime import custom_op
from warploom.runtime.args import KV, Geometry, check_results, checked_kv, key_value
from warploom.runtime.custom_op import Result, Runner
from warploom.runtime.declare import checked_flag
from warploom.runtime.guard import Guard
from warploom.runtime.plain import is_watched, needs_operator, paused
from warploom.runtime.planning import Planning
from warploom.runtime.reference import run_reference
from warploom.runtime.tensors import as_seen, as_torch


class Running(Planning):
    """The part of a wrapper that looks at the tensors of a run; `run` itself knows a short way."""

    handle: int
    sm_scale: float
    _geometry: Geometry
    _guard: Guard
    _lse_scale: float

    def _run_unknown(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any]
    ) -> Result:
        """Check all, and go through the operator where torch must know of the call."""
        self._inputs.check_names(inputs)
        return_lse = checked_flag("return_lse", return_lse)
        batch = self._batch
        if batch is None:
            raise self._not_planned()
        parts = kv if isinstance(kv, (tuple, list)) else (kv,)
        if needs_operator("run", (q, *parts, out, lse, *inputs.values())):
            return self._run_operator(q, kv, out, lse, return_lse, inputs)
        kv = checked_kv(kv, self.kv_format)
        q = as_torch(q, "q")
        out = out if out is None else as_torch(out, "out", shared=True)
        lse = lse if lse is None else as_torch(lse, "lse", shared=True)
        learnt, tensors = self._learnt(inputs), (q, *key_value(kv))
        is_traced, wants = torch.compiler.is_compiling(), learnt or custom_op.wanting(tensors)
        if wants and not is_traced:
            check_results(out, lse, tensors, self._geometry, batch)
        if wants or is_traced:  # the operator says that there is none, once a gradient is asked for
            return custom_op.compiled_run(
                cast(Runner, self), q, kv, out, lse, return_lse, inputs, learnt
            )
        held = self._guard
        if not held.try_enter(False):
            held.wait()
        try:
            if not is_watched():
                return self._admit_and_launch(q, kv, out, lse, return_lse, inputs)
            with paused():
                return self._admit_and_launch(q, kv, out, lse, return_lse, inputs)
        finally:
            held.leave()

    def _run_operator(
        self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool, inputs: dict[str, Any]
    ) -> Result:
        """Let torch work out what the call is: its operator in a graph, a result of fakes, ..."""
        if isinstance(kv, (tuple, list)) and len(kv) == 2:
            kv = as_seen(kv[0], "k"), as_seen(kv[1], "v")
        elif not isinstance(kv, torch.Tensor):
            kv = checked_kv(kv, self.kv_format)
        inputs = {name: self._inputs.seen(name, value) for name, value in inputs.items()}
        return custom_op.compiled_run(
            cast(Runner, self), as_seen(q, "q"), kv, out, lse, return_lse, inputs,
            self._learnt(inputs),
        )  # fmt: skip

    def _admit_and_launch(
        self,
        q: torch.Tensor,
        kv: KV,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        inputs: dict[str, Any],
    ) -> Result:
        """Run what has its turn: the plan stays as it is."""
        batch = self._batch
        if batch is None:  # another thread's plan was refused just now
            raise self._not_planned()
        if self._launcher is not None:
            if self._launcher.admit(q, kv, out, lse, return_lse):
                return self._launcher.launch(q, kv, out, lse, return_lse, inputs)
            return self._launcher.launch_copies(q, kv, out, lse, return_lse, inputs)
        tensors = (q, *key_value(kv))
        check_results(out, lse, tensors, self._geometry, batch)
        values = {**self._inputs.scalars, **self._inputs.tensors}
        values |= self._inputs.check_given(inputs)
        o, sums = run_reference(
            self._variant, batch, self._geometry, tensors, values, self.sm_scale
        )
        return custom_op.results(o, sums * self._lse_scale, out, lse, return_lse)

    def _learnt(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Values of fields, kept or given to a run, whose gradient may be asked for."""
        learnt = self._inputs.learnt
        return custom_op.wanting(({**learnt, **inputs} if learnt else inputs).values())
