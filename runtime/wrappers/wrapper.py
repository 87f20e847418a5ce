"""`AttentionWrapper`: plan once for the lengths of a batch, then run any number of times.

After listing 1 of the FlashInfer paper: `plan` works on the host; `run` rewrites what changed in
the kernel's parameters and launches, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from warploom.calls import explained
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.stand_ins import uncompiled, unseen
from warploom.dsl.variants.variant import Variant
from warploom.errors import WrongCall
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.devices.device import resolve_device
from warploom.runtime.formats import format_of
from warploom.runtime.formats.base import Format
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.inputs.aux_outputs import AuxOutput, Requested
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.prefetch import SMS
from warploom.runtime.launching.pretransformed_keys import Way
from warploom.runtime.operators import custom_op
from warploom.runtime.wrappers.compiled import Compiled
from warploom.runtime.wrappers.inspectable import Inspectable, lose_plan
from warploom.runtime.wrappers.plan_state import PlanState
from warploom.runtime.wrappers.planning import BatchPlanner
from warploom.runtime.wrappers.prefetching import PagePrefetcher
from warploom.runtime.wrappers.running import Runner
from warploom.runtime.wrappers.selected_pages import SelectedPages
from warploom.scheduler.model.bounds import Bounds


class AttentionWrapper(Inspectable):
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

    _serves_calls = False  # of `attention`: each gives all values, and captured plans stay

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
        declared = DeclaredAttention.of(
            variant, lambda: resolve_device(device), backend, self.planned_format,
            kv_format=kv_format, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, kv_dtype=kv_dtype,
            sm_scale=sm_scale, lse_base=lse_base, max_scores=max_scores, bounds=bounds,
            cuda_graph=cuda_graph, batch_invariant=batch_invariant, sm_limit=sm_limit, tile=tile,
            key_transform=key_transform, workspace=workspace,
        )  # fmt: skip
        is_fixed, of_calls = declared.options.fixed_tile, self._serves_calls
        geometry = declared.geometry(types_are_declared=not of_calls)
        inputs = Inputs(declared.spec.variant, geometry, bounds if is_fixed else None)
        inputs.bind({} if of_calls else declared.bound_inputs)
        compiled = None
        if declared.backend != "reference":
            compiled = Compiled(declared, geometry, inputs, workspace)
        owner = type(self).__name__
        state = PlanState(owner, None if compiled is None else compiled.launcher)
        super().__init__(declared, inputs, state, compiled)
        self.handle = custom_op.register_wrapper(self)
        parts = declared, geometry, inputs, state, compiled, self._selects()
        self._page_prefetcher = PagePrefetcher(geometry, bounds, state)
        self._batch_planner = BatchPlanner(
            *parts, self._page_prefetcher, lengths_are_checked=of_calls
        )
        self._runner = Runner(*parts, self.handle, owner, keeps_plans=is_fixed or of_calls)

    @classmethod
    def planned_format(cls, kv_format: KVFormat) -> Format[Any]:
        """The format as planners use it; raises ArgumentError if wrappers do not support it."""
        return format_of(kv_format)

    def _selects(self) -> SelectedPages | None:
        """The pages that a tensor names, of a `PageSelectionWrapper`."""
        return None

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

        After any error except InUse there is no plan, so that `run` cannot serve the previous batch
        in place of this one; this includes a misspelt or wrong input. Input values of earlier plans
        stay, and those of the refused call are not kept. Memory stays where it is, and launches
        that a CUDA graph holds may be replayed.

        Index arrays may be lists, NumPy arrays, or tensors of any DLPack producer. With declared
        bounds and int32 tensors on the wrapper's device, a kernel on the current stream plans
        (`runtime.strategies.planner` says when): nothing waits, and a CUDA graph can hold plan
        and run. Where prefills and decodes have tiles of their own, its plan may differ from the
        host's (decision 0062), and with it the last bits of outputs. This kernel does not compare
        page numbers and ragged keys with k and v, since only `run` gets the cache: a page number
        beyond the cache makes `run` read past its end. If the device refuses a batch, `check_plan`
        reports it; runs of such a plan compute nothing, leave `out` and `lse` as they were, and
        return new tensors uninitialised.
        Page numbers may always be on the device; if the host plans, these are not checked at all.
        Other device arrays are copied to the host if the host must plan, which waits for the
        device. A plan copies all index arrays (a captured plan does so at each replay): runs do not
        see what is written to the caller's arrays later.

        Args:
            qo_indptr: int32 [requests + 1], where each request's query rows begin.
            kv_indptr: int32; dense and ragged: [requests + 1] in tokens; rolling: [requests + 1] in
                tokens of whole sequences; paged: [requests + 1] in pages; block-sparse: [block rows
                of all requests + 1] in blocks.
            kv_indices: int32, pages or column blocks; indexed formats only. Entries from
                kv_indptr[-1] on are not read.
            last_page_len: int32 [requests], tokens in each last page; paged only.
            kv_lens: int32 [requests], keys of each request; block-sparse only.
            q_rows: number of rows that q will have, if the device plans; by default the most that
                the bounds allow. (A plan by the host does not need it: with `cuda_graph`, runs take
                a q with the batch's rows or, if the format is not dense and the back end is not the
                reference, with the most rows that the bounds allow. Rows of `out` and `lse` behind
                the batch's rows are not written.)
            **inputs: values of the variant's fields. They stay for later plans until they are given
                again; values given to `run` hold for that run only. Scalars of the mask are fixed
                here. A tensor of the mask that is given on the host, here or to the variant, is
                copied, and the planner uses its values to skip tiles; each plan reads it again, and
                no run does. If only `run` gets such a tensor, the plan is still correct, but skips
                no tiles because of its values; `check_lengths` then sees it in that run, and only
                on the CPU. A plan by the device needs all values that the mask reads.

        Runs wait for this plan, and it waits for earlier runs, on any streams. Replays of captured
        runs are not tracked: replay on the stream of `plan`, or order the two.

        Raises:
            BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType: a wrong index array.
            UnknownInput, WrongDevice: a wrong input.
            ArgumentError: later rows of a step have overwritten keys of a rolling cache that its
                first row sees, or another argument is not accepted.
            MissingInput: a scalar of the mask has no value, or the device plans and a tensor of the
                mask has none.
            FrozenByGraph: with `cuda_graph`, an input that captured launches could not see.
            BoundsExceeded, WorkspaceTooSmall: the batch does not fit.
            PlanInvalid: WARPLOOM_VERIFY_PLANS is set, and warploom has made a wrong plan.
            ForbiddenUnderCapture: the current stream is being captured, and the host must plan.
            InUse: another thread runs or plans this wrapper; the previous plan stays.
        """
        given = Arguments(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens, q_rows)
        self._batch_planner.plan(given, inputs)

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
            return self._runner.run_with_aux(
                q, kv, out, lse, max_scores, return_lse, return_aux, inputs
            )
        return self._runner.run(q, kv, out, lse, return_lse, inputs)

    @unseen
    def prefetch(self, kv: Any, max_bytes: int, *, sms: int = SMS) -> int:
        """Bring pages that the next run will read into L2, on the caller's current stream.

        Only a plan knows which those are, and in which order: the first work items of all CTAs come
        first. Enqueue it beside what the run waits for, such as a collective; it changes no result.
        The pages are worked out at the first call after a plan, so layers share them. A wrapper
        that has prefetched works them out in each `plan`, into the same memory, so that a captured
        prefetch follows the plan as a captured run does: under the same bounds, with
        `cuda_graph=True`. It keeps a table for each layout of caches and each budget.

        Args:
            kv: the cache, as `run` takes it. A page must be one block of memory.
            max_bytes: of keys and values together; whole pages only.
            sms: CTAs that ask, each on an SM.

        Returns:
            Bytes that are asked for: less than the budget, if the plan reads less.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            BadBudget, BudgetTooSmall: it is no number of bytes, or below a page.
            CannotPrefetch: the host does not know the pages, there are none, or they have memory in
                parts alone, as those of a `VirtualCache` that are longer than 128 tokens.
            HasGaps: a page is no block of memory.
            WrongDevice, WrongShape, IndexOutOfRange: not the cache of this wrapper.
            ForbiddenUnderCapture: what has to be worked out first, while a graph is captured.
            InUse: another thread plans.
        """
        return self._page_prefetcher.prefetch(kv, max_bytes, sms)

    def check_run(self, q: torch.Tensor, kv: Any, inputs: dict[str, Any]) -> None:
        """Raise what `run` would raise, without a launch, for callers that must check ahead.

        Args:
            q, kv: queries, keys and values, as `run` takes them.
            inputs: values of the variant's fields for that run.

        Raises:
            NotPlanned: there is no plan, or the last one was refused.
            WrongDType, WrongDevice, WrongShape, IndexOutOfRange: a wrong tensor.
            UnknownInput, MissingInput, PlanMismatch: a wrong input.
        """
        self._runner.check(q, kv, inputs)

    def learnt(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Values of fields, kept or given to a run, whose gradient may be requested."""
        return self._runner.learnt(inputs)
