"""What can be asked of a wrapper: its declaration, the kernels it may need, and its last plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.codegen.build import Job, build_all
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NotTraced
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.devices.device import Backend
from warploom.runtime.formats.batch import OnDevice
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.pretransformed_keys import KeyTransform
from warploom.runtime.launching.program import Program
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.strategy import Planned
from warploom.runtime.tensors.uncopied import Uncopied
from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.runtime.wrappers.why_roles import why_roles
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import Records
from warploom.scheduler.plans.capacity import WorkspaceSize
from warploom.scheduler.plans.plan import Plan

if TYPE_CHECKING:
    from warploom.codegen.compilers.arch import Arch
    from warploom.codegen.compilers.hostcc import HostTarget
    from warploom.runtime.wrappers.explain import Explanation

# attribute of FlashInfer's wrappers -> what to write instead
_FLASHINFER = {
    "forward": "call plan(...) once for a batch, and run(q, (k, v))",
    "begin_forward": "it is called plan(qo_indptr, kv_indptr, ...)",
    "end_forward": "leave it out: the next plan(...) replaces this one",
    "forward_return_lse": "call run(q, (k, v), return_lse=True)",
    "run_return_lse": "call run(q, (k, v), return_lse=True)",
    "reset_workspace_buffer": "a workspace belongs to the constructor: workspace=...",
}


def lose_plan(wrapper: Inspectable) -> None:
    """Drop the plan of a wrapper after a call of `plan` that does not fit its signature."""
    wrapper._state.lose()


class Inspectable(Uncopied):
    """Answers about a declaration on a device, its kernels, and the plan that it has.

    It is complete without what plans and runs (`AttentionWrapper`), and changes no plan.
    """

    def __init__(
        self,
        declared: DeclaredAttention,
        inputs: Inputs,
        state: PlanState,
        compiled: Compiled | None,
    ) -> None:
        """Answer about these parts.

        Args:
            declared: the declaration.
            inputs: values of the variant's fields.
            state: which has the plan.
            compiled: kernels, and what plans and launches; None for the reference.
        """
        self._declared, self._inputs = declared, inputs
        self._state, self._compiled = state, compiled
        self.spec: AttentionSpec = declared.spec
        self.kv_format: KVFormat = declared.kv_format
        self.device: torch.device = declared.device
        self.backend: Backend = declared.backend
        self.heads: Heads = declared.heads
        self.sm_scale: float = declared.sm_scale
        self.key_transform: KeyTransform = declared.key_transform
        self.recorded: tuple[str, ...] = declared.spec.variant.output_names

    @property
    def planned(self) -> Planned | None:
        """The plan on the device; None without one, and for the reference."""
        return self._state.planned

    @property
    def target(self) -> Arch | HostTarget:
        """What kernels are compiled for; not for the reference back end."""
        if self._compiled is None:
            raise AttributeError("target")
        return self._compiled.kernels.target

    @property
    def mask_scalars(self) -> frozenset[str]:
        """Scalars that the mask reads: `plan` fixes them, and `run` refuses other values."""
        return self._inputs.mask_scalars

    @property
    def mask_tensors(self) -> frozenset[str]:
        """Tensors that the mask reads."""
        return self._inputs.mask_tensors

    def check_plan(self) -> None:
        """Raise if the device refused the last plan; waits for the device.

        Runs of a refused plan compute nothing, so their output is undefined.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            NotReplayed: a CUDA graph holds the plan, and no replay has made one.
            BatchRefused: an index array was wrong or exceeded the bounds.
            ForbiddenUnderCapture: the current stream is being captured.
        """
        batch = self._state.required()
        if isinstance(batch, OnDevice) and self._compiled is not None:
            self._compiled.planner.check_status()

    def stamps(self) -> tuple[Plan, Records]:
        """The last plan and when its work items ran, for `wl.trace`; see `Planner.stamps`.

        Raises:
            ArgumentError: the back end is the reference, which runs no kernels.
            NotTraced: the kernels record no times.
            Those of `check_plan` and `Planner.stamps`.
            InUse: another thread plans.
        """
        planner = None if self._compiled is None else self._compiled.planner
        if planner is None:
            reason = "is 'reference', which runs no kernels; leave it out for those of the device"
            raise ArgumentError(name="backend", reason=reason)
        if not planner.rules.spec.stamps:  # a plan would not help, so this comes first
            raise NotTraced
        held = self._state.guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            self.check_plan()
            planned = self._state.planned
            assert planned is not None
            return planner.stamps(planned)
        finally:
            held.leave()

    @property
    def choice(self) -> TileChoice | None:
        """The tile of the last plan with the reason for it; None before, and for the reference."""
        return None if self.planned is None else self.planned.choice

    @property
    def scalars(self) -> dict[str, Any]:
        """Values of the variant's scalars that plans or the variant have set."""
        return dict(self._inputs.scalars)

    @property
    def program(self) -> Program | None:
        """The launches of a run of the last plan, and why; None before, and for the reference."""
        program = None if self._compiled is None else self._compiled.launcher.program
        if program is None or self.planned is None:
            return None
        return program.with_choice(self.choice)

    def why_roles(self) -> str | None:
        """Why the last batch, if it could be mixed, has two roles or one tile (`why_roles.py`)."""
        if self.backend != "cuda" or self._compiled is None or self.planned is None:
            return None
        return why_roles(self._compiled.planner.rules, self.planned, self._inputs)

    def warm_up(self, progress: bool | None = None) -> None:
        """Build the kernels of every tile that a plan can choose, in parallel, and load them.

        Args:
            progress: whether to show a progress bar; by default the settings and the terminal
                decide.

        Raises:
            BuildFailed, CompileError and others of `codegen.build.build_all`.
        """
        build_all(self.build_jobs(), progress=progress)
        if self._compiled is not None:
            for choice in self.choices():
                self._compiled.kernels.get(choice)
            self._compiled.planner.prepare()

    def build_jobs(self, choices: Sequence[TileChoice] | None = None) -> list[Job]:
        """Jobs for `codegen.build.build_all`, which can build several wrappers' kernels at once.

        Args:
            choices: tile choices to build for; `choices()` by default.
        """
        choices = self.choices() if choices is None else choices
        if self._compiled is None:
            return []
        kernels = self._compiled.kernels
        sources = dict.fromkeys(found for one in choices for found in kernels.sources(one))
        return [(source, kernels.target) for source in sources]

    @property
    def tile(self) -> TileConfig | None:
        """The tile of the last plan; None before, and for the reference."""
        return None if self.choice is None else self.choice.tile

    def tiles(self) -> list[TileConfig]:
        """Tiles that a plan can choose; none for the reference back end."""
        return list(dict.fromkeys(choice.tile for choice in self.choices()))

    def choices(self) -> list[TileChoice]:
        """Those tiles, each with the flag whether a separate kernel transforms keys before."""
        return [] if self._compiled is None else self._compiled.planner.choices()

    def workspace_size(self, bounds: Bounds | None = None) -> WorkspaceSize:
        """Exact bytes that any batch within the bounds needs (FlashInfer, appendix D).

        Args:
            bounds: the largest batch; the declared bounds by default.

        Raises:
            ArgumentError: there are no bounds, or the back end needs no workspace.
        """
        bounds = bounds or self._declared.options.bounds
        if bounds is None or self._compiled is None:
            raise ArgumentError(name="bounds", reason="give the largest batch")
        return self._compiled.planner.largest_size(bounds)

    def explain(self) -> Explanation:
        """What was chosen and why; print it for a table, or read its `facts`."""
        from warploom.runtime.wrappers.explain import explain  # rich is slow to import

        return explain(self)

    def __repr__(self) -> str:
        if "_state" not in vars(self):  # the constructor raised
            return object.__repr__(self)
        spec, variant = self.spec, self._declared.variant
        head = str(spec.head_dim_qk)
        if spec.head_dim_v != spec.head_dim_qk:
            head += f", head_dim_v={spec.head_dim_v}"
        kind = spec.dtype.name
        if spec.stored_dtype != spec.dtype:
            kind += f", kv_dtype={spec.stored_dtype.name}"
        shown = "no variant" if type(variant) is Variant else repr(variant)
        return (
            f"{type(self).__name__}({shown}, {self.kv_format}, num_q_heads={self.heads.num_q}, "
            f"num_kv_heads={self.heads.num_kv}, head_dim={head}, dtype={kind}, "
            f"device={self.device}, {'not ' if self._state.batch is None else ''}planned)"
        )

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> object:
            kind = type(self).__name__
            hint = f". FlashInfer has it; here, {_FLASHINFER[name]}" if name in _FLASHINFER else ""
            reason = f"{kind!r} object has no attribute {name!r}{hint}"
            raise AttributeError(reason, name=name, obj=self)
