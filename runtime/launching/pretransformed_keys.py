"""Keys transformed once, by a kernel just before attention, if many query tiles read each key.

A fused key transform is repeated for each query tile that reads the key. In a long prefill that
costs more than writing the transformed keys to memory and reading them (decision 0027).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from warploom.codegen.abi import Packer
from warploom.codegen.pretransform import COUNTS, POINTERS, STRIDES, PretransformSpec
from warploom.dsl.graphs.lanes import reads_other_lanes, reduces_lanes
from warploom.dsl.types.spec import AttentionSpec
from warploom.errors import ArgumentError
from warploom.runtime.devices.loaded import Kernel
from warploom.runtime.devices.params import Block, ParamBlock
from warploom.runtime.formats import format_of
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.launching.program import Pass
from warploom.runtime.tensors.shortcuts import allocator
from warploom.scheduler.model.bounds import INT32_MAX

Way = Literal["auto", "fused", "before"]

# Keys are pretransformed from this number of fused query rows on: 16 tiles of 128 rows. On an H200
# fused RoPE was 2 % faster at 8 tiles, and 8 % slower at 16.
PRETRANSFORM_ROWS = 2048.0
# The same for transforms that reduce over lanes (norms), which cost more per tile: fused norms were
# 5 % faster at 4 tiles and 2 to 7 % slower at 6. Fused norms with RoPE were 14 to 40 % slower at 4.
PRETRANSFORM_ROWS_OF_NORMS, PRETRANSFORM_ROWS_OF_BOTH = 768.0, 512.0


def pretransform_rows(spec: AttentionSpec) -> float:
    """The fewest fused query rows of a request for which its keys are pretransformed.

    Pretransforming costs a pass over the keys in memory and a launch, for any number of rows. What
    it saves grows with the number of query tiles that read a key, and with the cost of the
    transform per tile. All long prefills have about the same rows per tile, so the number of rows
    decides. Heads and requests do not matter, since cost and saving both grow with them.
    """
    hook = spec.variant.hooks.get("key_transform")
    if hook is None or not reduces_lanes(hook):
        return PRETRANSFORM_ROWS
    return PRETRANSFORM_ROWS_OF_BOTH if reads_other_lanes(hook) else PRETRANSFORM_ROWS_OF_NORMS


def may_pretransform(batch: Batch, batched: bool, num_kv_heads: int) -> bool:
    """Whether the keys of a batch can be transformed before attention.

    With a plan by the device the host knows no key counts, and kernels count keys in int32.
    """
    blocks = batch.num_requests if batched else 1
    return 0 < blocks * batch.kv_extent * num_kv_heads <= INT32_MAX


def obstacle_to_pretransform(
    spec: AttentionSpec, backend: str, cuda_graph: bool, batch_invariant: bool
) -> str | None:
    """Why only the attention kernel can transform keys; None if they can be pretransformed."""
    if "key_transform" not in spec.variant.hooks:
        return "the variant transforms no keys"
    if backend != "cuda":
        return f"the back end {backend!r} has no kernel that does it"
    if obstacle := format_of(spec.kv_format).obstacle_to_pretransform:
        return obstacle
    if spec.is_narrow:
        return "keys and values of 8 bits are read alike, and transformed keys have 16"
    if cuda_graph:
        return "launches that cuda_graph=True captures know no lengths"
    if batch_invariant:
        return "batch_invariant=True has one way for all batches"
    return None


def reason_for_fused(sm_limit: int | None, workspace: object) -> str | None:
    """Why "auto" does not pretransform keys: a limit that the caller set; None if there is none."""
    if sm_limit is not None:
        return "sm_limit leaves SMs to others, and the kernel before attention takes all"
    if workspace is not None:
        return "the caller gave a workspace, and pretransformed keys need more memory"
    return None


@dataclass(frozen=True)
class KeyTransform:
    """Where a wrapper's keys are transformed.

    Attributes:
        way: the way that the caller requested, or that follows from a given tile.
        obstacle: why keys are always fused, or None.
        asked_by: where `way` comes from, for `explain()`.
        rows: for "auto": keys are transformed before from this number of fused query rows on.
    """

    way: Way
    obstacle: str | None
    asked_by: str = "asked for"
    rows: float = PRETRANSFORM_ROWS

    @classmethod
    def of(
        cls,
        asked: str,
        has_tile: bool,
        obstacle: str | None,
        for_fused: str | None = None,
        rows: float = PRETRANSFORM_ROWS,
    ) -> KeyTransform:
        """Check the wrapper's `key_transform` argument.

        Args:
            asked: the argument.
            has_tile: whether the caller gave a tile, which names one kernel for all batches.
            obstacle: why keys cannot be pretransformed, or None.
            for_fused: why "auto" does not pretransform them, or None.
            rows: from `pretransform_rows`.

        Raises:
            ArgumentError: there is no such way, or it is impossible.
        """
        if asked not in get_args(Way):
            reason = f"is {asked!r}; expected one of {', '.join(map(repr, get_args(Way)))}"
            raise ArgumentError(name="key_transform", reason=reason)
        asked_by = "asked for"
        if asked == "auto" and has_tile:
            asked, asked_by = "fused", "a tile was given, and not key_transform='before'"
        if asked == "before" and obstacle is not None:
            raise ArgumentError(name="key_transform", reason=f"cannot be 'before': {obstacle}")
        if asked == "auto":
            obstacle = obstacle or for_fused
        return cls(asked, obstacle, asked_by, rows)  # type: ignore[arg-type]

    @property
    def may_be_before(self) -> bool:
        return self.obstacle is None and self.way != "fused"

    def explained(self, is_before: bool, mean_fused_rows: float) -> str:
        """Where a plan transforms keys, and why, for `explain()`."""
        rows = f"{mean_fused_rows:.4g} fused query rows per request on average"
        if self.way == ("before" if is_before else "fused"):
            reason = self.asked_by
        elif is_before:
            reason = f"{rows} are {self.rows:.0f} or more"
        elif self.obstacle is not None:
            reason = self.obstacle
        elif mean_fused_rows < self.rows:
            reason = f"{rows} are fewer than {self.rows:.0f}"
        else:
            reason = "the host knows of no keys, or of more than kernels count"
        how = "before attention, once for each key" if is_before else "in attention, with each tile"
        return f"{how}: {reason}"


class PretransformedKeys:
    """Launches of the kernel that writes transformed keys to scratch memory.

    The memory comes from torch's allocator. Each run allocates it, and frees it when attention is
    enqueued: torch reuses it only later on the same stream, and in a captured graph it belongs to
    the graph. So wrappers hold none between runs, and layers share it.

    Attributes:
        inputs: takes values of fields, for the attention kernel and for this kernel.
    """

    def __init__(self, spec: PretransformSpec, geometry: Geometry, params: ParamBlock) -> None:
        """Begin without a kernel.

        Args:
            spec: spec of the kernel.
            geometry: geometry of the wrapper.
            params: parameters of attention, which hold the address of the plan.
        """
        self._geometry = geometry
        self._params = params
        self._allocate = allocator(geometry.device)
        packer = Packer(spec.fields)
        self._block = Block(packer, packer.size)
        self._block.set("num_q_heads", geometry.num_q_heads)
        self._block.set("num_kv_heads", geometry.num_kv_heads)
        self._write_strides = self._block.writer("q", STRIDES)
        self._write_pointers = self._block.writer("Q", POINTERS)
        self._write_counts = self._block.writer("i", COUNTS)
        self.inputs = BothBlocks(params, self._block, frozenset(packer.names))

    def take(self, kernel: Kernel) -> Pass:
        """Use this kernel from now on."""
        taken = Pass(kernel, self._block)
        self._enqueue = taken.bind()
        return taken

    def planned(self, batch: Batch) -> None:
        """Take the lengths of a batch; the parameters hold the address of its plan."""
        batched = self._geometry.batched
        blocks, tokens = batch.num_requests if batched else 1, batch.kv_extent
        heads, dim = self._geometry.num_kv_heads, self._geometry.head_dim_qk
        sizes = {"block": blocks, "token": tokens, "head": heads, "dim": dim}
        strides = {"block": tokens * heads * dim, "token": heads * dim, "head": dim, "dim": 1}
        axes = self._geometry.kv_axes
        self._shape = tuple(sizes[axis] for axis in axes)
        self._strides = tuple(strides[axis] for axis in axes)
        self._key_strides = strides["block"] if batched else 0, strides["token"], strides["head"]
        self._write_counts(batch.num_segments, blocks, tokens)
        if blocks * tokens * heads > INT32_MAX:  # "auto" fuses such keys; see `may_pretransform`
            reason = f"would pretransform {blocks} x {tokens} tokens of {heads} heads, beyond int32"
            raise ArgumentError(name="key_transform", reason=f"{reason}; ask for 'fused'")
        self._segments = int(self._params.get("segments"))
        self._is_empty = blocks * tokens == 0

    def scratch(self) -> torch.Tensor:
        """Memory for the transformed keys of the batch, in the shape of the keys."""
        return self._allocate(self._shape, self._strides, self._geometry.dtype)

    def admit(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Take the (block, token, head) strides of keys; returns those of transformed keys."""
        self._write_strides(*strides, *self._key_strides)
        return self._key_strides

    def launch(self, k: int, stream: int) -> torch.Tensor:
        """Enqueue the transform of the keys at address `k`; returns the tensor for the result."""
        keys = self.scratch()
        if not self._is_empty:
            self._write_pointers(k, keys.data_ptr(), self._segments)
            self._enqueue(stream)
        return keys


class BothBlocks:
    """Writes a member to the parameters of attention and, if it exists there, of pretransform."""

    def __init__(self, params: Block, before: Block, known: frozenset[str]) -> None:
        self._params, self._before, self._known = params, before, known

    def set(self, name: str, value: int | float) -> None:
        """Write a member to both blocks."""
        self._params.set(name, value)
        if name in self._known:
            self._before.set(name, value)
