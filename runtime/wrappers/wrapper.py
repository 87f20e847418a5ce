"""`AttentionWrapper`: plan once for the lengths of a batch, then run any number of times.

After listing 1 of the FlashInfer paper: `plan` works on the host; `run` rewrites what changed in
the kernel's parameters and launches, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from warploom.calls import explained
from warploom.codegen.build import Job, build_all
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.stand_ins import unseen
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError, WrongCall
from warploom.runtime.declaring.declare import (
    as_format,
    checked_flag,
    checked_lse_scale,
    checked_scale,
    group_size,
    make_spec,
)
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.declaring.wrapper_options import checked_options, kernel_parts
from warploom.runtime.devices.device import Backend, resolve_backend, resolve_device
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.formats import format_of
from warploom.runtime.formats.base import Format
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.aux_outputs import AuxOutput, Requested
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.launching.launch import Launcher
from warploom.runtime.launching.pretransformed_keys import PretransformedKeys, Way
from warploom.runtime.operators import custom_op
from warploom.runtime.planning.rules import Options
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.planner import Planner
from warploom.runtime.tensors.tensors import as_torch
from warploom.runtime.wrappers.guard import Guard
from warploom.runtime.wrappers.prefetching import Prefetching
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.plans.capacity import WorkspaceSize

if TYPE_CHECKING:
    from warploom.codegen.compilers.arch import Arch
    from warploom.codegen.compilers.hostcc import HostTarget
    from warploom.runtime.wrappers.explain import Explanation


class AttentionWrapper(Prefetching):
    """Attention of one variant over one KV format, for batches of any lengths.

    A wrapper serves one batch at a time. Threads may run the same plan, one after the other. A
    thread that plans needs its own wrapper, or a lock around `plan` and the runs of its batch.

    Attributes:
        spec: the declaration, traced and checked.
        kv_format: storage of keys and values, with its layout.
        device: where tensors must be.
        backend: "cuda", "cpu" or "reference".
        heads: head counts.
        key_transform: where keys are transformed.
        planned: the plan on the device, or None.
        handle: number under which the custom operator finds this wrapper.
        recorded: names of the outputs that the variant records values in.
    """

    _declares_types = True  # so that messages may propose others
    _plans_once = False

    @explained
    @unseen
    def __init__(
        self,
        variant: Variant | type[Variant] | None = None,
        *,
        kv_format: KVFormat | None = None,
        num_q_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: str | DType | torch.dtype = "float16",
        kv_dtype: str | DType | torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        backend: str | None = None,
        sm_scale: float | None = None,
        lse_base: str = "e",
        bounds: Bounds | None = None,
        workspace: Any = None,
        cuda_graph: bool = False,
        sm_limit: int | None = None,
        batch_invariant: bool = False,
        tile: TileConfig | None = None,
        key_transform: Way = "auto",
        max_scores: bool = False,
    ) -> None:
        """Declare the wrapper, and build kernels whose tile is known from the declaration.

        Args:
            variant: the functors; None is plain attention over all keys.
            kv_format: storage of keys and values; `Ragged()` by default. A `PageSelectionWrapper`
                must be given `Paged`.
            num_q_heads, num_kv_heads: head counts; num_kv_heads defaults to num_q_heads and must
                divide it.
            head_dim, head_dim_v: multiples of 8 from 8 to 256; head_dim_v defaults to head_dim.
            dtype: type of q, k, v and the output: float16, bfloat16 or (CPU) float32.
            kv_dtype: type of k and v if it is not `dtype`: float8_e4m3fn, float8_e5m2 or int8.
                Kernels widen k and v to `dtype`; scales are fields of the variant, see `KVScale`.
            device: the current CUDA device by default, or the CPU.
            backend: "reference" evaluates the variant with NumPy; None is the device's own back
                end.
            sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
            lse_base: "e" or "2", base of the log-sum-exp that `run` returns.
            bounds: the largest batch; fixes all buffers, and `plan` refuses larger batches.
            workspace: contiguous uint8 tensor to use instead of the wrapper's own memory; see
                `workspace_size`. Wrappers may share one. A wrapper must then plan again before it
                runs if another wrapper has planned since.
            cuda_graph: nothing may move between plans: tile, grid and addresses follow from
                `bounds`, and the scalars of the mask stay as first planned.
            sm_limit: number of CTAs, out of `planned.kernel.num_ctas`, that may get work; None is
                all. An SM may hold several CTAs.
            batch_invariant: fix the tile and the split size, so that the bits of a request's result
                do not depend on the rest of the batch. A tile for decodes has its own split size.
            tile: use this tile instead of choosing one; it may contain another tile for decodes.
            key_transform: where keys are transformed. "fused": in the attention kernel, again for
                each query tile. "before": in a separate kernel, into memory that each run allocates
                and frees. "auto": "before" where many query tiles read each key and it is possible.
            max_scores: build kernels that can write the largest score of each row, which runs may
                request. Such kernels rescale outputs more often, as maxima grow.

        Raises:
            VariantError: the variant cannot be traced.
            UnsupportedSpec, BadHeadDim, ArgumentError: no kernel supports the declaration.
            WorkspaceTooSmall: `workspace` cannot hold all batches within the bounds.
            NoGpu, NoHostCompiler, NoCudaCompiler: the device or its compiler is missing.
        """
        self._variant = as_variant(variant)
        self._setup(traced_once(self._variant)[1], as_format(kv_format), num_q_heads, num_kv_heads,
                    head_dim, head_dim_v, dtype, kv_dtype, resolve_device(device), backend,
                    checked_flag("max_scores", max_scores))  # fmt: skip
        self._lse_scale = checked_lse_scale(lse_base)
        self.sm_scale = checked_scale(sm_scale, head_dim)
        options, self.key_transform = checked_options(
            self.spec, self.backend, self.planned_format(self.kv_format), self.heads.group_size,
            bounds=bounds, cuda_graph=cuda_graph, batch_invariant=batch_invariant,
            sm_limit=sm_limit, tile=tile, key_transform=key_transform, workspace=workspace,
        )  # fmt: skip
        self._bounds = bounds
        self.recorded = self.spec.variant.output_names
        kept = bounds if options.fixed_tile else None
        self._inputs = Inputs(self.spec.variant, self._geometry, kept)
        self._inputs.bind(self._bound_inputs())
        self._keeps_plans = options.fixed_tile or self._plans_once
        self._guard = Guard(type(self).__name__, self._forget)
        self.planned = None
        self._batch = None
        self._launcher = None  # none for the reference
        if self.backend != "reference":
            memory = None if workspace is None else as_torch(workspace, "workspace", shared=True)
            self._connect(options, Workspace(self.device, memory, bounds is not None))
        self.handle = custom_op.register_wrapper(self)

    @classmethod
    def planned_format(cls, kv_format: KVFormat) -> Format[Any]:
        """The format as planners use it; raises ArgumentError if wrappers do not support it."""
        return format_of(kv_format)

    def _setup(
        self, traced: TracedVariant, kv_format: KVFormat, num_q_heads: int,
        num_kv_heads: int | None, head_dim: int, head_dim_v: int | None,
        dtype: str | DType | torch.dtype, kv_dtype: str | DType | torch.dtype | None,
        device: torch.device, backend: str | None, max_scores: bool,
    ) -> None:  # fmt: skip
        self.device = device
        self.backend: Backend = resolve_backend(backend, device)
        num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
        group_size(num_q_heads, num_kv_heads)
        self.kv_format = kv_format
        self.spec = make_spec(
            traced, head_dim, head_dim_v, dtype, kv_format, device, kv_dtype, max_scores
        )
        self.heads = Heads(int(num_q_heads), int(num_kv_heads))  # from NumPy's, too
        self._geometry = Geometry(
            kv_format=kv_format,
            num_q_heads=self.heads.num_q,
            num_kv_heads=self.heads.num_kv,
            head_dim_qk=self.spec.head_dim_qk,
            head_dim_v=self.spec.head_dim_v,
            dtype=getattr(torch, self.spec.dtype.name),
            kv_dtype=getattr(torch, self.spec.stored_dtype.name),
            device=device,
            is_declared=self._declares_types,
        )

    def _connect(self, options: Options, workspace: Workspace) -> None:
        """Create the parts that only a compiled back end has."""
        self._workspace = workspace
        made, pretransform, always = kernel_parts(self.spec, self.heads, self.key_transform)
        self._kernels = Kernels(made, self.device, pretransform, always)
        self._params = ParamBlock(self.spec)
        for name, value in (
            ("num_q_heads", self.heads.num_q),
            ("num_kv_heads", self.heads.num_kv),
            ("group_size", self.heads.group_size),
            ("sm_scale", self.sm_scale),
            ("lse_scale", self._lse_scale),
        ):
            self._params.set(name, value)
        self._planner = Planner(
            self.spec, self.heads, self._kernels, workspace, self._params, options, self.device
        )
        keys = (
            PretransformedKeys(pretransform, self._geometry, self._params) if pretransform else None
        )
        self._launcher = Launcher(self._geometry, self._params, self._inputs, workspace, keys)
        self._planner.reserve()

    @property
    def target(self) -> Arch | HostTarget:
        """What kernels are compiled for; not for the reference back end."""
        return self._kernels.target

    @property
    def mask_scalars(self) -> frozenset[str]:
        """Scalars that the mask reads: `plan` fixes them, and `run` refuses other values."""
        return self._inputs.mask_scalars

    @property
    def mask_tensors(self) -> frozenset[str]:
        """Tensors that the mask reads."""
        return self._inputs.mask_tensors

    def _bound_inputs(self) -> dict[str, Any]:
        """Values bound at construction that the traced functors read."""
        bound = self._variant.inputs()
        return {name: bound[name] for name in self.spec.variant.input_names if name in bound}

    @overload
    def run(
        self, q: Any, kv: Any, *, out: Any = ..., lse: Any = ..., max_scores: Any = ...,
        return_lse: Literal[False] = ..., return_aux: None = ..., **inputs: Any,
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def run(
        self, q: Any, kv: Any, *, out: Any = ..., lse: Any = ..., max_scores: Any = ...,
        return_lse: Literal[True], return_aux: None = ..., **inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    @overload
    def run(
        self, q: Any, kv: Any, *, out: Any = ..., lse: Any = ..., max_scores: Any = ...,
        return_aux: Requested, **inputs: Any,
    ) -> tuple[torch.Tensor, AuxOutput]: ...  # fmt: skip

    @overload
    def run(
        self, q: Any, kv: Any, *, out: Any = ..., lse: Any = ..., max_scores: Any = ...,
        return_lse: bool, return_aux: None = ..., **inputs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def run(
        self,
        q: Any = ...,
        kv: Any = ...,
        *more: object,
        out: Any = None,
        lse: Any = None,
        max_scores: Any = None,
        return_lse: bool = False,
        return_aux: Requested | None = None,
        **inputs: Any,
    ) -> Any:
        """Attention of the planned batch, on the caller's current stream.

        Args:
            q: [rows, num_q_heads, head_dim]; for dense storage [batch, rows, num_q_heads,
                head_dim], or [batch, num_q_heads, rows, head_dim] in layout HND.
            kv: (k, v), or a paged cache [pages, 2, ...]. Shapes by format, NHD: dense [batch,
                tokens, heads, dim], ragged and block-sparse [tokens, heads, dim], paged [pages,
                page_size, heads, dim], rolling [batch, slots, heads, dim]; HND swaps tokens and
                heads.
            out: tensor for the output, shaped like q with head_dim_v.
            lse: float32 tensor for the log-sum-exp, shaped like q without head_dim.
            max_scores: float32 tensor for the largest scores, shaped like `lse`.
            return_lse: return the log-sum-exp too.
            return_aux: an `AuxRequest`, as in FlexAttention: what to return in an `AuxOutput`, in
                place of `return_lse`. Largest scores need a wrapper made with `max_scores=True`.
            **inputs: values of the variant's fields for this run. Captured in a CUDA graph, scalars
                are frozen and tensors are read by address.

        Returns:
            The output; with `return_lse` also the log-sum-exp, with `return_aux` an `AuxOutput`.
            Rows that see no key have output 0, log-sum-exp -inf and largest score -inf. Results are
            undefined if the device refused the plan; `check_plan` reports that.

        Raises:
            WrongCall: q or kv is not given.
            NotPlanned: there is no plan, or the last one was refused.
            WrongDType, WrongDevice, WrongShape, IndexOutOfRange: a wrong tensor.
            WrongStride: elements of `out` or `lse` overlap.
            ArgumentError: a paged cache has strides or an address that kernels cannot read, and is
                too large to copy; or, on the CPU, the variant's `check_lengths` refuses a tensor of
                the mask.
            UnknownInput, MissingInput, PlanMismatch: a wrong input; PlanMismatch also if another
                wrapper has planned into this one's workspace.
            InUse: another thread plans.
            NoGradient: raised when `backward()` reaches this call; for forward-mode differentiation
                it is raised at once.
        """
        if more:
            reason = "keys and values are one argument: run(q, (k, v)); the others need their names"
            raise WrongCall(function="run", reason=reason)
        if return_aux is not None or max_scores is not None or is_dynamo_compiling():
            return self._run_with_aux(q, kv, out, lse, max_scores, return_lse, return_aux, inputs)
        held = self._guard
        if held.is_mine() or not held.try_enter(False):
            held.wait()
        try:
            launcher = self._launcher
            if (
                launcher is not None
                and launcher.is_admitted(q, kv, out, lse, return_lse)
                and not ((inputs or self._inputs.learnt) and self._learnt(inputs))
            ):
                return launcher.launch(q, kv, out, lse, return_lse, inputs)
        finally:
            held.leave()
            del held
        return self._run_unknown(q, kv, out, lse, return_lse, inputs)

    def warm_up(self, progress: bool | None = None) -> None:
        """Build the kernels of every tile that a plan can choose, in parallel, and load them.

        Args:
            progress: whether to show a progress bar; by default the settings and the terminal
                decide.

        Raises:
            BuildFailed, CompileError and others of `codegen.build.build_all`.
        """
        build_all(self.build_jobs(), progress=progress)
        for choice in self.choices():
            self._kernels.get(choice)
        if self.backend != "reference":
            self._planner.prepare()

    def build_jobs(self, choices: Sequence[TileChoice] | None = None) -> list[Job]:
        """Jobs for `codegen.build.build_all`, which can build several wrappers' kernels at once.

        Args:
            choices: tile choices to build for; `choices()` by default.
        """
        choices = self.choices() if choices is None else choices
        sources = dict.fromkeys(found for one in choices for found in self._kernels.sources(one))
        return [(source, self._kernels.target) for source in sources]

    @property
    def tile(self) -> TileConfig | None:
        """The tile of the last plan; None before, and for the reference."""
        return None if self.choice is None else self.choice.tile

    def tiles(self) -> list[TileConfig]:
        """Tiles that a plan can choose; none for the reference back end."""
        return list(dict.fromkeys(choice.tile for choice in self.choices()))

    def choices(self) -> list[TileChoice]:
        """Those tiles, each with the flag whether a separate kernel transforms keys before."""
        return [] if self.backend == "reference" else self._planner.choices()

    def workspace_size(self, bounds: Bounds | None = None) -> WorkspaceSize:
        """Exact bytes that any batch within the bounds needs (FlashInfer, appendix D).

        Args:
            bounds: the largest batch; the declared bounds by default.

        Raises:
            ArgumentError: there are no bounds, or the back end needs no workspace.
        """
        bounds = bounds or self._bounds
        if bounds is None or self.backend == "reference":
            raise ArgumentError(name="bounds", reason="give the largest batch")
        return self._planner.largest_size(bounds)

    def explain(self) -> Explanation:
        """What was chosen and why; print it for a table, or read its `facts`."""
        from warploom.runtime.wrappers.explain import explain  # rich is slow to import

        return explain(self)
