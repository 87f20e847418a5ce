"""Decode context parallelism: the keys of each request lie on several ranks.

Every rank attends with all queries to its own keys, and the states are merged: FlashDecoding's
split keys, over ranks. With heads="own" it is how Helix Parallelism shares keys out (Bhatia et al.
2025). What a rank sends does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from warploom.dsl.types.formats import KVFormat
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NotPlanned
from warploom.runtime.declaring.declare import checked_lse_scale
from warploom.runtime.formats import format_of
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.serving.distributed.epilogue import OutputTransform, has_output_transform, learnt_of
from warploom.serving.distributed.layouts import Interleaved, checked_size
from warploom.serving.distributed.peers import Peers
from warploom.serving.distributed.placed import Placed
from warploom.serving.distributed.placement import Placement, check_sizes, table_of
from warploom.serving.distributed.states import (
    States,
    empty_states,
    merged_lse,
    merged_out,
    without_gradient,
)
from warploom.serving.distributed.uncompiled import uncompiled

HeadsOf: TypeAlias = Literal["all", "own"]


class DecodeWrapper:
    """`AttentionWrapper` over keys that lie on all ranks of a group.

    All ranks make one with the same options, plan the same requests, and run together. The options
    `cuda_graph` and `bounds` mean what they mean there: a captured `run` holds the exchange, too,
    on a group whose backend can be captured (NCCL).

    Attributes:
        layout: which keys lie where.
        rank, world: this process and how many there are.
        local: the wrapper of this rank's keys.
    """

    def __init__(
        self,
        variant: Variant | type[Variant] | None = None,
        *,
        group: Any = None,
        interleave: int = 1,
        heads: HeadsOf = "all",
        timeout: float | None = None,
        kv_format: KVFormat | None = None,
        lse_base: str = "e",
        **options: Any,
    ) -> None:
        """Declare; a collective call is not made.

        Args:
            variant: as of `AttentionWrapper`; its functors see positions of whole sequences. An
                output transform is applied once, to the merged output.
            group: process group; the default one by default.
            interleave: keys of a block: block i of each sequence lies on rank i % world.
            heads: "all": queries and outputs have all heads, on every rank. "own": they have the
                num_q_heads / world heads of this rank, as tensor parallelism leaves them; queries
                are gathered, and each rank gets the output of its heads alone.
            timeout: seconds that a rank may take to answer; by default the group's timeout holds.
            kv_format: how a rank stores its own keys.
            lse_base: "e" or "2", base of the log-sum-exp that `run` returns.
            **options: of `AttentionWrapper`; `num_q_heads` counts the heads of all ranks.

        Raises:
            ArgumentError: there is no process group, or heads that do not divide evenly.
            UnsupportedSpec: a variant that records, or largest scores.
            As `AttentionWrapper`.
        """
        self._peers = Peers(group, timeout)
        self.rank, self.world = self._peers.rank, self._peers.world
        self.layout = Interleaved(self.world, checked_size("interleave", interleave))
        if options.get("max_scores"):
            raise ArgumentError(name="max_scores", reason="is not merged over ranks; leave it out")
        self._lse_scale = checked_lse_scale(lse_base)
        self._variant = Placed(variant, None, self.layout)
        self.local = AttentionWrapper(self._variant, kv_format=kv_format, **options)
        self._placement = Placement(self.local, options.get("bounds"))
        self._format = format_of(self.local.kv_format)
        self._is_hnd = self._format.batched and self.local.kv_format.layout == "HND"
        self._heads = _checked_heads(heads, self.local.heads.num_q, self.world)
        self._epilogue = None
        if has_output_transform(self._variant.inner):
            self._epilogue = OutputTransform(
                self._variant, self.local, None, self._format.batched, options
            )
        self._is_planned = False

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the wrapper was made; not by replays of a graph."""
        return self._peers.sent

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any = None,
        last_page_len: Any = None,
        *,
        total_kv_lens: Any,
        kv_lens: Any = None,
        q_rows: int | None = None,
        **inputs: Any,
    ) -> None:
        """Plan a batch; as `AttentionWrapper.plan`, with arrays of this rank's own keys.

        `layout.local_len(total_kv_lens, rank)` says how many of each request these are. With
        declared bounds and all arrays on the device, the device plans, and a graph may hold it.

        Args:
            qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens, q_rows: of this rank.
            total_kv_lens: int32 [requests], keys of each request on all ranks together.
            **inputs: values of the variant's fields, indexed by positions of whole sequences.

        Raises:
            ArgumentError: the arrays hold another number of keys than this rank has of the total.
            WrongShape: a tensor ends before the whole sequences do.
            As `AttentionWrapper.plan`.
        """
        self._is_planned = False
        is_on_device = isinstance(total_kv_lens, torch.Tensor) and total_kv_lens.is_cuda
        total = total_kv_lens if is_on_device else np.asarray(total_kv_lens, np.int64)
        if is_on_device:
            q_lens = torch.as_tensor(qo_indptr, device=total.device).diff()
            self._variant.expected = None
        else:
            q_lens = np.diff(_on_host(qo_indptr))
            self._expect(q_lens, total)
            check_sizes(self._variant, inputs, self.local.heads, q_lens, total)
        table = table_of(self._variant, self.rank, self.rank,
                         kv_lens=total, q_lens=q_lens, q_rows=total * 0)  # fmt: skip
        with self._placement.given(table) as placed:
            self.local.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens=kv_lens,
                            q_rows=q_rows, **inputs, **placed)  # fmt: skip
        if self._epilogue is not None:
            self._epilogue.plan(qo_indptr, table, q_rows, inputs)
        self._is_planned = True

    def _expect(self, q_lens: Any, total: Any) -> None:
        if len(total) != len(q_lens):
            reason = f"has {len(total)} entries for {len(q_lens)} requests"
            raise ArgumentError(name="total_kv_lens", reason=reason)
        own = self.layout.local_len(total, self.rank)
        self._variant.expected = (q_lens, q_lens), (own, total)

    @uncompiled
    def run(self, q: Any, kv: Any, *, return_lse: bool = False, **inputs: Any) -> Any:
        """Attention of the planned batch over the keys of all ranks, which all must call.

        Args:
            q: as of `AttentionWrapper.run`, the same on all ranks; with heads="own", this rank's
                heads alone.
            kv: this rank's keys and values.
            return_lse: return the log-sum-exp too.
            **inputs: values of the variant's fields for this run.

        Returns:
            The output, and the log-sum-exp if asked for: the same bits on all ranks; with
            heads="own", of this rank's heads.

        Raises:
            RankLost: a rank ended, or did not answer in time.
            OutOfStep: an earlier run failed after ranks had begun to exchange.
            NotPlanned: there is no plan, or the last one was refused.
            As `AttentionWrapper.run`.
        """
        if not self._is_planned:
            raise NotPlanned()
        axis = 1 if self._is_hnd else q.dim() - 2
        self._check(q, kv, inputs, axis)
        with self._peers.in_step(), torch.no_grad():
            results = self._attended(q, kv, inputs, axis, return_lse)
        parts = kv if isinstance(kv, (tuple, list)) else (kv,)
        learnt = learnt_of(self.local, self._epilogue, (q, *parts), inputs)
        results = without_gradient(results, learnt)
        return results if return_lse else results[0]

    def _check(self, q: torch.Tensor, kv: Any, inputs: dict[str, Any], axis: int) -> None:
        """Refuse what is wrong before any rank is sent something: a refused run may be repeated."""
        if self._heads == "own":
            own, num_q = q.movedim(axis, 0), self.local.heads.num_q
            expected = num_q // self.world
            if len(own) != expected:
                reason = f"has {len(own)} heads; with heads='own' this rank has {expected}"
                raise ArgumentError(name="q", reason=reason)
            q = own[:1].expand(num_q, *own.shape[1:]).movedim(0, axis)
        self.local.check_run(q, kv, inputs)

    def _attended(
        self, q: torch.Tensor, kv: Any, inputs: dict[str, Any], axis: int, with_lse: bool
    ) -> tuple[torch.Tensor, ...]:
        """Output of the heads that this rank returns, and the log-sum-exp if it is wanted."""
        given = self._gathered(q, axis) if self._heads == "own" else q
        heads_first = given.movedim(axis, 0)
        own = empty_states(heads_first.shape[:-1], self.local.spec.head_dim_v, q.dtype, q.device)
        out, lse = own.out.movedim(0, axis), own.lse.movedim(0, axis)
        self.local.run(given, kv, out=out, lse=lse, **inputs)
        found = self._merged(self._swapped(own), inputs, axis, with_lse)
        out = found[0].to(q.dtype).contiguous()
        return (out, (found[1] * self._lse_scale).contiguous()) if with_lse else (out,)

    def _merged(
        self, states: States, inputs: dict[str, Any], axis: int, with_lse: bool
    ) -> tuple[torch.Tensor, ...]:
        """Output of all ranks as one, transformed, and the log-sum-exp if it is wanted."""
        softmax = self._variant.softmax
        out = merged_out(states, softmax).movedim(0, axis)
        if not with_lse and self._epilogue is None:
            return (out,)
        lse = merged_lse(states, softmax).movedim(0, axis)
        if self._epilogue is not None:
            out = self._epilogue.run(out, lse, axis, inputs)
            if self._heads == "own":
                out, lse = (x.chunk(self.world, axis)[self.rank] for x in (out, lse))
        return out, lse

    def _gathered(self, q: torch.Tensor, axis: int) -> torch.Tensor:
        """Queries of all heads, of those of each rank."""
        own = q.movedim(axis, 0).contiguous()
        whole = own.new_empty((self.world, *own.shape))
        self._exchange([[own]] * self.world, [[part] for part in whole], "queries")
        return whole.flatten(0, 1).movedim(0, axis)

    def _swapped(self, own: States) -> States:
        """States of the heads that this rank merges, of all ranks."""
        parts = [own] * self.world
        if self._heads == "own" and self._epilogue is None:
            each = (x.chunk(self.world) for x in own)
            parts = [States(*part) for part in zip(*each, strict=True)]
        size = own.out.shape[-1]
        shape = (self.world, *parts[0].lse.shape)
        every = empty_states(shape, size, own.out.dtype, own.out.device)
        self._exchange(parts, list(zip(*every, strict=True)), "states")
        return every

    def _exchange(
        self,
        parts: Sequence[Sequence[torch.Tensor]],
        into: Sequence[Sequence[torch.Tensor]],
        what: str,
    ) -> None:
        """Give each rank its part, and take one of each."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        sends, receives = ({rank: x[rank] for rank in others} for x in (parts, into))
        exchange = self._peers.start(sends, receives, what)
        for own, place in zip(parts[self.rank], into[self.rank], strict=True):
            place.copy_(own)
        exchange.wait()


def _checked_heads(heads: HeadsOf, num_q_heads: int, world: int) -> HeadsOf:
    if heads not in ("all", "own"):
        raise ArgumentError(name="heads", reason=f"is {heads!r}; expected 'all' or 'own'")
    if heads == "own" and num_q_heads % world:
        reason = f"is 'own', and {num_q_heads} query heads are not shared evenly by {world} ranks"
        raise ArgumentError(name="heads", reason=reason)
    return heads


def _on_host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, np.int64)
