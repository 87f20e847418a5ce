"""What FlashInfer's wrappers share: the wrappers of warploom behind them, and their plans.

A kernel depends on what FlashInfer is told at `plan` and, of scales and sinks, at `run`, and on
what `forward` is given in place of the plan's. So a facade keeps a wrapper for each declaration
that it meets, and plans those that runs ask for: at `plan` what runs of the batch before used (for
CUDA graphs all that runs have used, as replays run none), others at their first run of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch

from warploom.engines.flashinfer.declared import Declaration
from warploom.engines.flashinfer.refusals import checked_layout, refuse
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words
from warploom.errors import ArgumentError, ForbiddenUnderCapture, FrozenByGraph, NotPlanned
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.tensors.tensors import as_torch
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds

_MOST_WRAPPERS = 8  # of a facade without graphs: layers of a model differ in a few ways
_LOG2_E = math.log2(math.e)

Plan = TypeVar("Plan", bound=Callable[..., None])


@dataclass
class Made:
    """A wrapper, and the numbers that its last plan had; None if it has no plan."""

    wrapper: AttentionWrapper
    values: dict[str, Any] | None = None


@dataclass(frozen=True)
class Step:
    """A batch as it is planned.

    Attributes:
        declaration: without scales and sinks.
        shaping: the arguments that the declaration's scores came from.
        lists: the four arguments of `AttentionWrapper.plan` that are given by position.
        lens: kv_lens, of block-sparse formats.
        tensors: values of fields: bits of a mask.
    """

    declaration: Declaration
    shaping: Shaping
    lists: tuple[Any, Any, Any, Any]
    lens: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)

    def plan(self, made: Made) -> None:
        """Plan it; values that the wrapper has are left out, as plans without any are fastest."""
        rows, kv_indptr, kv_indices, last_page_len = self.lists
        values, known = self.shaping.values, made.values
        made.values = None  # in case that it is refused
        given = {} if values == known else values
        made.wrapper.plan(
            rows, kv_indptr, kv_indices, last_page_len, kv_lens=self.lens, **given, **self.tensors
        )
        made.values = values

    def copied(self) -> Step:
        """With lists of its own: the caller may write to the planned ones before the next run."""
        rows, *pages = (_copied(one) for one in self.lists)
        return replace(self, lists=(rows, *pages), lens=_copied(self.lens))


def _copied(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.clone()
    return given if given is None else np.array(given)


@dataclass(frozen=True)
class Reshaped:
    """What `forward` is given in place of what `plan` was given.

    Attributes:
        sm_scale: factor of q.k, as a declaration has it.
        changes: arguments of `Shaping`, and their values there: equal for what means the same.
    """

    sm_scale: float | None
    changes: tuple[tuple[str, Any], ...]

    def of(self, step: Step) -> Step:
        """The batch of a step, with these."""
        shaping = replace(step.shaping, **dict(self.changes))
        scores, sm_scale = shaping.scores, self.sm_scale
        declaration = replace(step.declaration, scores=scores, sm_scale=sm_scale)
        return replace(step, declaration=declaration, shaping=shaping)


class Use(NamedTuple):
    """What a run is given that makes another kernel, or other numbers of a plan."""

    scales: bool = False
    sinks: bool = False
    reshaped: Reshaped | None = None


@dataclass(frozen=True)
class RunScales:
    """Numbers that q.k and the output are multiplied with."""

    of_logits: float = 1.0
    of_values: float = 1.0

    @classmethod
    def of(cls, q_scale: Any, k_scale: Any, v_scale: Any) -> RunScales:
        """From FlashInfer's; None is 1. Reading a tensor of one number waits for it."""
        if q_scale is None and k_scale is None and v_scale is None:
            return _NO_SCALES
        named = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        q, k, v = (_number(name, value) for name, value in named.items())
        return cls(q * k, v)

    @property
    def are_needed(self) -> bool:
        return self is not _NO_SCALES and self != _NO_SCALES

    @property
    def inputs(self) -> dict[str, float]:
        """Values of `KVScale`; q.k of scaled queries is q.k of scaled keys."""
        return {"k_scale": self.of_logits, "v_scale": self.of_values}


_NO_SCALES = RunScales()


def _number(name: str, given: Any) -> float:
    if given is None:
        return 1.0
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            remedy = "Give one number, or warploom.HeadKVScale to warploom.AttentionWrapper."
            refuse(f"{name} of shape {tuple(given.shape)}", "it is one number here", remedy)
        if is_capturing(given.device):
            reason = "is a tensor, which a host cannot read while a CUDA graph is being captured"
            raise ArgumentError(name=name, reason=f"{reason}; give a float")
        return float(given.item())
    if not isinstance(given, Real):
        raise ArgumentError(name=name, reason=f"is {given!r}; expected a number")
    return float(given)


def takes_a_new_batch(plan: Plan) -> Plan:
    """Decorates `plan` of a facade: it forgets the batch before, since it may refuse its own."""

    @wraps(plan)
    def anew(self: Facade, *args: Any, **named: Any) -> None:
        self._forget()
        plan(self, *args, **named)

    return cast(Plan, anew)


class Facade:
    """Base of FlashInfer's wrappers.

    Attributes:
        device: where tensors must be; that of the workspace, which is not used otherwise.
        kv_layout: "NHD" or "HND", of keys and values.
        words: names of arguments in messages of warploom, and what they are called here.
        pages_of_graphs: the buffer whose length bounds pages.
        wrapper: warploom's own of the last run, for `explain()` and `warploom.trace`; None before.
    """

    words: ClassVar[Words] = {}
    pages_of_graphs: ClassVar[str] = ""
    wrapper: AttentionWrapper | None = None

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> object:
            kind, hint = type(self).__name__, ""
            if name[0] != "_" and hasattr(AttentionWrapper, name):
                behind = "None before a run" if self.wrapper is None else "that of the last run"
                hint = f". It is .wrapper.{name}, of the AttentionWrapper behind it: {behind}"
            text = f"{kind!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)

    def __init__(self, device: torch.device, kv_layout: str, use_cuda_graph: bool = False) -> None:
        self.device = device
        self.kv_layout: Any = checked_layout(kv_layout)
        self._use_cuda_graph = bool(use_cuda_graph)
        # the last used one is the last
        self._made: dict[tuple[Declaration, Reshaped | None], Made] = {}
        self._ready: dict[Use, AttentionWrapper] = {}  # those planned for the present batch
        self._uses: dict[Use, None] = {}
        self._step: Step | None = None
        self._reshaped: Reshaped | None = None  # what `forward` was given since the plan
        self._missing = "there is no plan yet"
        self._bounds: Bounds | None = None  # of graphs, from the first plan on
        self._first: tuple[Declaration, Shaping] | None = None  # of graphs, likewise

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether runs may be captured and replayed with later plans."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Without effect: wrappers allocate what they need, on the device that they were made for.

        Args:
            float_workspace_buffer: any tensor on that device.
            int_workspace_buffer: not used.

        Raises:
            ArgumentError: no tensor, or one on another device.
        """
        given = workspace_device(float_workspace_buffer)
        is_any = self.device.index is None and given.type == self.device.type
        if given != self.device and not is_any:
            reason = f"is on {given}, and the wrapper attends on {self.device}; make another there"
            raise ArgumentError(name="float_workspace_buffer", reason=reason)

    def workspace_size(self, *lists: Any, **more: Any) -> tuple[int, int]:
        """Bytes that FlashInfer's two workspaces need here: none, as they are not used.

        `.wrapper.workspace_size(bounds)` says what the wrapper behind needs of its own.

        Args:
            *lists, **more: arguments of `plan`, which are not looked at.
        """
        return 0, 0

    def end_forward(self) -> None:
        """Without effect, as in FlashInfer."""

    def _forget(self) -> None:
        self._step = self._reshaped = None
        self._ready.clear()
        self._missing = "the last plan() was refused, or interrupted"

    def _plan(self, step: Step, bounds: Bounds | None = None) -> None:
        """Plan a batch; `bounds` are those of graphs, kept from the first plan on."""
        self._forget()
        if self._use_cuda_graph:
            self._keep(step, bounds)
        uses = list(self._uses) or [Use()]
        if not self._use_cuda_graph:
            self._uses = {}  # also if the batch is refused for one of them
        for use in uses:
            self._wrapper(step, use)
        self._step = step.copied()

    def _keep(self, step: Step, bounds: Bounds | None) -> None:
        """Refuse what captured launches would not see."""
        if self._first is None or not self._uses:  # no run was captured
            self._first, self._bounds = (step.declaration, step.shaping), bounds
            return
        pairs: list[tuple[Any, Any]] = [
            (step.shaping, self._first[1]),
            (step.declaration, self._first[0]),
        ]
        for new, first in pairs:
            for one in fields(first):
                got, expected = getattr(new, one.name), getattr(first, one.name)
                if got != expected:
                    remedy = "Plan with the same"
                    raise FrozenByGraph(name=one.name, got=got, expected=expected, remedy=remedy)

    def _wrapper(self, step: Step, use: Use) -> AttentionWrapper:
        """The wrapper for this use, planned for the batch."""
        if use in self._ready:
            return self._ready[use]
        if use.reshaped is not None:
            step = use.reshaped.of(step)
        declaration = step.declaration.using(use.scales, use.sinks)
        key = declaration, use.reshaped  # numbers of `forward` are of a plan of their own
        found = self._made.pop(key, None)
        if found is None:
            found = Made(declaration.make(self.device, self._bounds))
        self._made[key] = found
        while len(self._made) > _MOST_WRAPPERS and not self._use_cuda_graph:
            del self._made[next(iter(self._made))]
        step.plan(found)
        self._ready[use] = found.wrapper
        return found.wrapper

    def _planned(self) -> Step:
        if self._step is None:
            raise NotPlanned(what=self._missing)
        return self._step

    @contextmanager
    def _reshape(self, sm_scale: float | None, **changes: Any) -> Iterator[None]:
        """Within it, and until the next plan, these hold in place of what `plan` was given.

        If what is within raises, those of before hold again.
        """
        step, before = self._planned(), self._reshaped
        asked = Reshaped(sm_scale, tuple(changes.items())).of(step)
        alike = tuple((name, getattr(asked.shaping, name)) for name in changes)
        is_planned = (asked.declaration, asked.shaping) == (step.declaration, step.shaping)
        self._reshaped = None if is_planned else Reshaped(asked.declaration.sm_scale, alike)
        try:
            yield
        except BaseException:
            self._reshaped = before
            raise

    def _check_window(self, window_left: int | None) -> None:
        """A window of a run must be that of the plan, or of `forward` since, as in FlashInfer."""
        step = self._planned()
        shaping = (step if self._reshaped is None else self._reshaped.of(step)).shaping
        planned = shaping.window_left
        if window_left is not None and max(window_left, -1) != planned:
            reason = f"is {window_left}, but plan() was given {planned}; plan with the window"
            raise ArgumentError(name="window_left", reason=reason)

    def _attend(
        self, q: Any, kv: Any, *, out: Any = None, lse: Any = None, return_lse: bool = False,
        scales: RunScales | None = None, sinks: Any = None, first_decode: int | None = None,
    ) -> Any:  # fmt: skip
        """Run the batch as it is planned, with what this run is given.

        `first_decode` is the request from which on scales hold; None is all requests.
        """
        step = self._planned()
        has_scales = scales is not None and scales.are_needed
        use = Use(has_scales, sinks is not None, self._reshaped)
        if use not in self._ready and is_capturing(self.device):
            # replays would repeat this batch's plan
            what = "run() or forward() was given what no run since the plan was given, or left it"
            raise ForbiddenUnderCapture(what=what, remedy="Run so once before the capture.")
        self.wrapper = wrapper = self._wrapper(step, use)
        self._uses[use] = None  # which it is planned for
        inputs: dict[str, Any] = {}
        if use.scales and scales is not None:
            inputs |= scales.inputs
            if first_decode is not None:
                inputs["first_decode"] = first_decode
        if use.sinks:
            sinks = inputs["sink"] = as_torch(sinks, "sinks").float()
        converts = step.declaration.types.out != step.declaration.types.q
        result = wrapper.run(
            q, kv, out=None if converts else out, lse=lse if return_lse else None,
            return_lse=return_lse, **inputs,
        )  # fmt: skip
        o, sums = result if return_lse else (result, None)
        if converts:
            o = _converted(o, step.declaration.types.out, out)
        if sums is None:
            return o
        return o, sums if sinks is None else with_sinks(sums, sinks)


def with_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps in base 2, changed in place, as FlashInfer gives them: the sink is a key."""
    return torch.logaddexp2(lse, sinks * _LOG2_E, out=lse)


def _converted(o: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return o.to(dtype)
    if out.dtype != dtype or out.shape != o.shape:
        reason = f"is {tuple(out.shape)} of {out.dtype}; expected {tuple(o.shape)} of {dtype}"
        raise ArgumentError(name="out", reason=reason)
    return out.copy_(o)


def workspace_device(buffer: Any) -> torch.device:
    """The device of a workspace, which has no other use; raises ArgumentError if it has none."""
    if not isinstance(buffer, torch.Tensor):
        reason = f"is {buffer!r}; expected a tensor of any size, whose device is taken"
        raise ArgumentError(name="float_workspace_buffer", reason=reason)
    return buffer.device
