"""One run: check tensors if they changed, write addresses, launch on the caller's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from warploom.codegen.source import TileConfig
from warploom.runtime.devices.graph import pool_captures
from warploom.runtime.devices.params import Members, ParamBlock
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.args import (
    KV,
    Geometry,
    byte_range,
    check_apart,
    check_key_values,
    check_lse,
    check_out,
    check_query,
    contiguous,
    key_value,
    row_strides,
)
from warploom.runtime.inputs.aux_outputs import MaxScores
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.inputs.outputs import check_recorded_apart, check_run_apart
from warploom.runtime.launching.kernels import Kernel
from warploom.runtime.launching.pretransformed_keys import PretransformedKeys
from warploom.runtime.launching.program import Pass, Program
from warploom.runtime.launching.tensor_map import TensorMaps
from warploom.runtime.tensors import shortcuts
from warploom.runtime.tensors.plain import modes, refuse_freed
from warploom.runtime.tensors.strides import (
    Obstacle,
    new_result,
    obstacle,
    reachable,
    result_strides,
    room_for,
)
from warploom.runtime.tensors.tensors import byte_span

_ALIGNMENT = 16  # bytes of a vector that a CUDA kernel loads

Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class Run(NamedTuple):
    """The arguments of one call of `run`, with torch tensors.

    Attributes:
        q, kv: queries, and keys and values or the cache that holds both.
        out, lse: the caller's tensors for the results, or None.
        return_lse: whether the log-sum-exp is returned.
        given: values of fields for this run only.
    """

    q: torch.Tensor
    kv: KV
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    given: Mapping[str, Any]

    @property
    def read(self) -> dict[str, torch.Tensor]:
        """q, k and v by name."""
        return dict(zip("qkv", (self.q, *key_value(self.kv)), strict=True))


class Launcher:
    """Launches the runs of one wrapper.

    Tensors are *admitted* once: their shapes, strides and types are checked, and what is derived
    from these is kept. A later call that differs in addresses only, such as that of another layer,
    costs one comparison (`is_admitted`), writing the addresses, and the launch.

    Attributes:
        program: the launches of a run of the last plan; None before the first plan.
    """

    def __init__(
        self,
        geometry: Geometry,
        params: ParamBlock,
        inputs: Inputs,
        workspace: Workspace,
        pretransforming: PretransformedKeys | None = None,
    ) -> None:
        self._geometry = geometry
        self._params = params
        self._pretransforming = pretransforming  # for plans that pretransform keys
        self._pretransformed: PretransformedKeys | None = None  # None unless this plan does so
        self._members: Members = params if pretransforming is None else pretransforming.inputs
        self._inputs = inputs
        self._workspace = workspace
        self._reads: dict[str, torch.Tensor] = {}  # tensors that all runs read, except q, k and v
        self._read_bytes: dict[str, tuple[int, int]] = {}  # begin and end addresses of these
        self._shares_memory, self._streams = workspace.is_given, workspace.streams
        if workspace.is_given:
            self.reads("workspace", workspace.memory)
        self._device = device = geometry.device
        is_cuda = device.type == "cuda"
        self._misaligned = _ALIGNMENT - 1 if is_cuda else 0
        self._only_device = not is_cuda or torch.cuda.device_count() == 1
        self._allocate = shortcuts.allocator(device)
        if self._streams is not None:
            self._streams.tell(self._used_on)
        self._maps_of: dict[TileConfig, TensorMaps | None] = {}
        self._form: tuple[bool, ...] | None = None
        self._kernel: Kernel | None = None
        self.program: Program | None = None
        self._rows: tuple[int, int] | None = None  # requests and rows that `_out_shape` is for

    def reads(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor that runs read: no run writes to it, and it outlives their stream."""
        self._reads[name], self._read_bytes[name] = tensor, byte_range(tensor)
        if self._streams is not None:
            self._streams.used(tensor)

    def planned(self, batch: Batch, kernel: Kernel) -> None:
        """Take a new plan, which has just been enqueued on the current stream."""
        if kernel is not self._kernel:
            self._take_kernel(kernel)
        self._needs_inputs = self._inputs.incomplete
        for name, tensor in self._inputs.tensors.items():
            if self._reads.get(name) is not tensor:
                self.reads(name, tensor)
        self.replanned(batch)

    def replanned(self, batch: Batch) -> None:
        """Take a new plan with the kernel and the inputs of the previous one."""
        self._inputs.write_planned(self._members)
        self._form, self._batch = None, batch
        if self._pretransformed is not None:
            self._pretransformed.planned(batch)
        rows = batch.sizes.num_requests, batch.q_rows
        if rows != self._rows:
            self._out_shape = self._geometry.q_shape(batch, self._geometry.head_dim_v)
            self._lse_shape = self._geometry.lse_shape(batch)
            self._lse_strides = contiguous(self._lse_shape)
            self._rows = rows  # last, since an interrupt may come before

    def _take_kernel(self, kernel: Kernel) -> None:
        self._kernel = None  # until all is set, since an interrupt may come
        attention, self._pretransformed = Pass(kernel, self._params), None
        self.program = Program((attention,))
        if kernel.pretransform is not None and self._pretransforming is not None:
            self._pretransformed = self._pretransforming
            self.program = Program((self._pretransformed.take(kernel.pretransform), attention))
        self._enqueue = attention.bind()
        self._tensor_maps = self._maps_of.get(kernel.tile)
        if kernel.tile not in self._maps_of:
            self._tensor_maps = TensorMaps.of(self._geometry, kernel.tile)
            self._maps_of[kernel.tile] = self._tensor_maps
        self._kernel = kernel

    def forget(self) -> None:
        """Forget the admitted tensors: the next call is checked fully."""
        self._form = None

    def before_plan(self) -> None:
        """Forget the admitted tensors; the current stream waits for runs that read the old plan."""
        self._form = None
        self._workspace.await_last()

    def _used_on(self, stream: torch.cuda.Stream) -> None:
        """Keep torch from reusing memory of plans and inputs before a stream is done with it."""
        for tensor in {self._workspace.memory, *self._reads.values()}:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def is_admitted(self, q: Any, kv: Any, out: Any, lse: Any, return_lse: bool) -> bool:
        """True if these arguments differ from the admitted ones in addresses at most."""
        pair = type(kv) is tuple and len(kv) == 2
        if self._form != (pair, out is None, lse is None, return_lse):
            return False
        if modes() or forward_ad._current_level >= 0 or pool_captures.is_on:
            return False  # torch's comparison ignores modes and tangents; pools need their check
        tensors = (q, *kv) if pair else (q, kv)
        if out is not None:
            tensors = (*tensors, out)
        if lse is not None:
            tensors = (*tensors, lse)
        return self._same(*tensors)

    def start(self, run: Run, max_scores: MaxScores | None) -> Result:
        """Check tensors fully and launch, with copies of tensors that the kernel cannot reach.

        Args:
            run: tensors that need not be admitted yet; this call admits them.
            max_scores: where to write them, or None; the run after it is checked fully.

        Raises:
            WrongDType, WrongDevice, WrongShape, WrongStride, IndexOutOfRange: a wrong tensor.
            ArgumentError: a result overlaps another tensor; or a paged cache is too large to be
                copied by every run.
        """
        strides = self._checked_strides(run)
        reaches = not self._obstacles(run)
        if reaches:
            self._admit(run, strides)
        if max_scores is not None:
            return self._launch_with_max_scores(run, max_scores, reaches)
        if reaches:
            return self.launch(*run)
        self._check_apart(run)
        return self._launch_copies(run)

    def _admit(self, run: Run, strides: tuple[int, ...]) -> None:
        """Write the strides of checked tensors, so that `is_admitted` accepts tensors like them."""
        q, kv, out, lse = run.q, run.kv, run.out, run.lse
        k, v = pair = key_value(kv)
        self._form = None
        self._out_strides = result_strides(q, self._geometry.head_dim_v)
        if self._pretransformed is not None:
            strides = (*strides[:3], *self._pretransformed.admit(strides[3:6]), *strides[6:])
        self._params.set_strides(strides)
        self._maps = None
        if self._tensor_maps is not None:
            self._maps = self._tensor_maps.of_layout(self._like_keys(k), v)
        self._v_behind_k = v.data_ptr() - k.data_ptr()  # used if one cache holds both
        given = [x for x in (out, lse) if x is not None]
        self._same = shortcuts.like(q, *(pair if isinstance(kv, tuple) else (kv,)), *given)
        self._spans = tuple(0 if x is None else byte_span(x) for x in (q, k, v, out, lse))
        if not any(x.requires_grad for x in (q, k, v)):  # else the next call must go through torch
            self._form = isinstance(kv, tuple), out is None, lse is None, run.return_lse

    def _like_keys(self, k: torch.Tensor) -> torch.Tensor:
        """A tensor with the layout of the keys that the attention kernel reads."""
        if self._pretransformed is None:
            return k
        with torch.cuda.device(self._device):
            return self._pretransformed.scratch()

    def launch(
        self,
        q: torch.Tensor,
        kv: KV,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        given: Mapping[str, Any],
    ) -> Result:
        """Launch with admitted tensors: the members of a `Run`, passed one by one to save time."""
        if not self._only_device and shortcuts.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.launch(q, kv, out, lse, return_lse, given)
        if self._shares_memory:
            self._workspace.check_held()
        kept: dict[str, torch.Tensor] = {}
        if given or self._needs_inputs or self._inputs.overridden:
            kept = self._inputs.write_given(given, self._members)
        if isinstance(kv, tuple):
            k_at, v_at = kv[0].data_ptr(), kv[1].data_ptr()
        else:
            k_at = kv.data_ptr()
            v_at = k_at + self._v_behind_k
        q_at, o_at = q.data_ptr(), 0 if out is None else out.data_ptr()
        if (q_at | k_at | v_at | o_at) & self._misaligned:
            run = Run(q, kv, out, lse, return_lse, given)
            if self._obstacles(run):  # there is none if the misaligned tensor is empty
                self._check_apart(run)
                return self._launch_copies(run)
        writes_to_given = out is not None or lse is not None
        if out is None:
            out = self._allocate(self._out_shape, self._out_strides, self._geometry.dtype)
        if lse is None and return_lse:
            lse = self._allocate(self._lse_shape, self._lse_strides, torch.float32)
        o_at, lse_at = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        if not (q_at and k_at and v_at and o_at and (lse_at or lse is None)):
            _refuse_freed(q, kv, out, lse)  # empty tensors pass
        if writes_to_given and (kept or self._may_reach(q_at, k_at, v_at, o_at, lse_at)):
            read = dict(zip("qkv", (q, *key_value(kv)), strict=True))
            check_apart({"out": out, "lse": lse}, read | self._reads | kept)
        if self._inputs.outputs:
            results = {"out": out, "lse": lse}
            others = dict(zip("qkv", (q, *key_value(kv)), strict=True)) | results
            check_recorded_apart(self._inputs.outputs, self._reads, kept, others)
        stream = 0 if self._streams is None else self._streams.current()
        keys: torch.Tensor | None = None
        if self._pretransformed is not None:
            keys = self._pretransformed.launch(k_at, stream)
            k_at = keys.data_ptr()
        if self._maps is not None:
            self._params.set_tensor_maps(self._maps(k_at, v_at))
        self._params.set_pointers(q_at, k_at, v_at, o_at, lse_at)
        self._enqueue(stream)
        del kept, keys  # inputs and pretransformed keys must live until the launch
        return (out, lse) if return_lse and lse is not None else out

    def _launch_copies(self, run: Run) -> Result:
        """Launch with copies of the checked tensors that the kernel cannot reach.

        Raises:
            ArgumentError: a paged cache is too large to be copied by every run.
        """
        read, out = run.read, run.out
        found = self._obstacles(run)
        target = new_result(run.q, self._geometry.head_dim_v) if out is None else out
        if out is not None and (of_out := found.pop("out", None)):
            target = room_for(out, "out", of_out)
        for name, each in found.items():
            is_cache = name != "q" and self._geometry.format.is_cache
            read[name] = reachable(read[name], name, each, is_cache)
        kv = (read["k"], read["v"]) if found.keys() & {"k", "v"} else run.kv
        copied = run._replace(q=read["q"], kv=kv, out=target)
        if not self.is_admitted(*copied[:5]):
            self._admit(copied, self._checked_strides(copied))
        result = self.launch(*copied)
        if out is None or target is out:
            return result
        out.copy_(result[0] if isinstance(result, tuple) else result)
        return (out, *result[1:]) if isinstance(result, tuple) else out

    def _obstacles(self, run: Run) -> dict[str, Obstacle]:
        """Why the kernel cannot access tensors, by the names of these tensors."""
        maps, pretransformed = self._tensor_maps is not None, self._pretransformed is not None
        vector = self._misaligned + 1
        k, v = key_value(run.kv)
        found = {
            "q": obstacle(run.q, vector),
            "k": obstacle(k, vector, maps and not pretransformed),
            "v": obstacle(v, vector, maps),
            "out": None if run.out is None else obstacle(run.out, vector),
        }
        return {name: each for name, each in found.items() if each is not None}

    def _launch_with_max_scores(self, run: Run, max_scores: MaxScores, reaches: bool) -> Result:
        """Launch so that the largest scores are written, too; with copies unless `reaches`."""
        if not self._only_device and shortcuts.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self._launch_with_max_scores(run, max_scores, reaches)
        self._form = None
        if max_scores.tensor is not None:
            check_lse(max_scores.tensor, self._geometry, self._batch, "max_scores")
        if max_scores.tensor is not None or not reaches:
            self._check_apart(run, max_scores.tensor)
        if max_scores.tensor is None:
            max_scores.tensor = self._allocate(self._lse_shape, self._lse_strides, torch.float32)
        by_axis = row_strides(max_scores.tensor.stride(), self._geometry)
        self._params.set_max_scores(max_scores.tensor.data_ptr(), by_axis)
        try:
            return self.launch(*run) if reaches else self._launch_copies(run)
        finally:
            self._form = None
            self._params.set_max_scores(0, (0, 0, 0))

    def _check_apart(self, run: Run, max_scores: torch.Tensor | None = None) -> None:
        """Refuse results that overlap tensors that the run reads, all as the caller gave them."""
        written = {"out": run.out, "lse": run.lse, "max_scores": max_scores}
        check_run_apart(self._inputs.outputs, self._reads, run.given, run.read, written)

    def _checked_strides(self, run: Run) -> tuple[int, ...]:
        """All strides, in the order of `ParamBlock.set_strides`; raises as `start` does."""
        out, lse = run.out, run.lse
        geometry, batch = self._geometry, self._batch
        of_query = check_query(run.q, geometry, batch)
        made_out, made_lse = result_strides(run.q, geometry.head_dim_v), self._lse_strides
        return (
            *of_query,
            *check_key_values(*key_value(run.kv), geometry, batch),
            *(row_strides(made_out, geometry) if out is None else check_out(out, geometry, batch)),
            *(row_strides(made_lse, geometry) if lse is None else check_lse(lse, geometry, batch)),
        )

    def _may_reach(self, q: int, k: int, v: int, o: int, lse: int) -> bool:
        """True if results at these addresses overlap each other or a tensor that the run reads."""
        q_span, k_span, v_span, o_span, lse_span = self._spans
        o_end, lse_end = o + o_span, lse + lse_span
        for begin, end in self._read_bytes.values():
            if (o < end and begin < o_end) or (lse < end and begin < lse_end):
                return True
        reaches = (
            (o < q + q_span and q < o_end)
            or (o < k + k_span and k < o_end)
            or (o < v + v_span and v < o_end)
        )
        if reaches or lse == 0:  # 0: no log-sum-exp is wanted
            return reaches
        return (
            (lse < q + q_span and q < lse_end)
            or (lse < k + k_span and k < lse_end)
            or (lse < v + v_span and v < lse_end)
            or (lse < o_end and o < lse_end)
        )


def _refuse_freed(q: torch.Tensor, kv: KV, *results: torch.Tensor | None) -> None:
    k, v = kv if isinstance(kv, tuple) else (kv, kv)
    for name, tensor in zip(("q", "k", "v", "out", "lse"), (q, k, v, *results), strict=True):
        if tensor is not None:
            refuse_freed(tensor, name, byte_span(tensor))
