"""Context parallelism of prefill: queries and keys of each sequence lie on several ranks.

"ring": keys go round, and each rank attends to those of one rank after another, while the next ones
are on their way (Ring Attention, Liu et al. 2023). "all_gather": each rank first collects all keys,
and attends once (Llama 3, Dubey et al. 2024, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from warploom.codegen.attention.templates import HOPPER, template_of
from warploom.dsl.types.formats import Ragged
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NotPlanned, WrongShape
from warploom.runtime.declaring.declare import checked_lse_scale
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.formats.lists import as_indptr
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.serving.distributed.epilogue import OutputTransform, has_output_transform, learnt_of
from warploom.serving.distributed.layouts import Ints, Layout, Lengths, ZigZag
from warploom.serving.distributed.peers import Peers
from warploom.serving.distributed.placed import Placed
from warploom.serving.distributed.placement import Placement, check_sizes, table_of
from warploom.serving.distributed.states import States, with_more, without_gradient
from warploom.serving.distributed.uncompiled import uncompiled

# SMs that attention leaves to messages: with 8 two H200s lost nothing to them, with 2 they waited.
_SMS_OF_MESSAGES = 8
Method: TypeAlias = Literal["ring", "all_gather"]


class PrefillWrapper:
    """Attention of ragged sequences whose tokens lie on all ranks of a group.

    All ranks make one with the same options, plan the same lengths, and run together. One plan
    serves all layers of a model.

    Attributes:
        layout: which tokens lie where.
        rank, world: this process and how many there are.
    """

    def __init__(
        self,
        variant: Variant | type[Variant] | None = None,
        *,
        group: Any = None,
        layout: Callable[[int], Layout] | None = None,
        method: Method = "ring",
        timeout: float | None = None,
        lse_base: str = "e",
        **options: Any,
    ) -> None:
        """Declare; a collective call is not made.

        Args:
            variant: as of `AttentionWrapper`; its functors see positions of whole sequences. An
                output transform is applied once, to the merged output.
            group: process group; the default one by default.
            layout: makes the layout of a group of that many ranks; `ZigZag` by default. One with
                arguments: `lambda world: Interleaved(world, block=64)`.
            method: "ring" holds keys of two ranks at a time, "all_gather" those of all.
            timeout: seconds that a rank may take to answer; by default the group's timeout holds.
            lse_base: "e" or "2", base of the log-sum-exp that `run` returns.
            **options: of `AttentionWrapper`, without `kv_format`, which is ragged, and without
                `cuda_graph`: `DecodeWrapper` alone can be captured. A ring on Hopper leaves 8 SMs
                to messages in all steps but the last, unless `sm_limit` is given; None
                takes all.

        Raises:
            ArgumentError: there is no process group, no such method, or `cuda_graph`.
            UnsupportedSpec: a variant that records, or largest scores.
            As `AttentionWrapper`.
        """
        self._peers = Peers(group, timeout)
        self.rank, self.world = self._peers.rank, self._peers.world
        if isinstance(layout, Layout):
            reason = f"is {layout!r}; expected what makes one, such as lambda world: {layout!r}"
            raise ArgumentError(name="layout", reason=reason)
        self.layout = (layout or ZigZag)(self.world)
        if not (isinstance(self.layout, Layout) and self.layout.world == self.world):
            reason = f"made {self.layout!r}; expected a Layout of {self.world} ranks"
            raise ArgumentError(name="layout", reason=reason)
        if method not in ("ring", "all_gather"):
            raise ArgumentError(name="method", reason=f"is {method!r}; expected ring or all_gather")
        for name in ("kv_format", "max_scores"):
            if options.get(name):
                reason = "is not taken here: keys are ragged, and largest scores are not merged"
                raise ArgumentError(name=name, reason=reason)
        if options.get("cuda_graph"):
            reason = (
                "is not taken here: sizes and addresses of a prefill change with each plan. Decode "
                "alone can be captured: DecodeWrapper(cuda_graph=True)"
            )
            raise ArgumentError(name="cuda_graph", reason=reason)
        self._lse_scale = checked_lse_scale(lse_base)
        is_ring = method == "ring"
        keys = self.layout if is_ring else None
        last = _Part(Placed(variant, self.layout, keys), options)
        beside_messages = room_for_messages(last.wrapper) | options
        self._parts = [
            _Part(Placed(variant, self.layout, keys), beside_messages)
            for _ in range(self.world - 1 if is_ring else 0)
        ]
        self._parts.append(last)
        first = self._parts[0]
        self._softmax = first.variant.softmax
        self._epilogue = None
        if has_output_transform(first.variant.inner):
            self._epilogue = OutputTransform(
                first.variant, first.wrapper, self.layout, False, options
            )
        self._tokens: list[int] | None = None  # keys of each rank
        self._whole_order: torch.Tensor | None = None  # of gathered keys
        self._is_ring = is_ring

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the wrapper was made."""
        return self._peers.sent

    def plan(self, q_lens: Lengths, kv_lens: Lengths | None = None, **inputs: Any) -> None:
        """Plan a batch by the lengths of whole sequences.

        Args:
            q_lens: query rows of each request, on all ranks together.
            kv_lens: keys likewise; as many as rows by default. Queries are the last tokens.
            **inputs: values of the variant's fields, indexed by positions of whole sequences.

        Raises:
            ArgumentError: lengths that are negative, or not one for each request.
            WrongShape: a tensor ends before the whole sequences do.
            As `AttentionWrapper.plan`.
        """
        self._tokens = None
        rows = _lengths("q_lens", q_lens)
        keys = rows if kv_lens is None else _lengths("kv_lens", kv_lens)
        if len(keys) != len(rows):
            reason = f"has {len(keys)} entries for {len(rows)} requests"
            raise ArgumentError(name="kv_lens", reason=reason)
        heads = self._parts[0].wrapper.heads
        check_sizes(self._parts[0].variant, inputs, heads, rows, keys)
        for step, part in enumerate(self._parts):
            source = (self.rank - step) % self.world
            table = part.plan(self.layout, (self.rank, source), rows, keys, inputs)
            if self._epilogue is not None and step == 0:
                own = as_indptr(self.layout.local_len(rows, self.rank))
                self._epilogue.plan(own, table, None, inputs)
        tokens = [int(self.layout.local_len(keys, rank).sum()) for rank in range(self.world)]
        if not self._is_ring:
            order = torch.from_numpy(np.argsort(self.layout.order(keys.tolist())))
            self._whole_order = order.to(self._parts[0].wrapper.device)
        self._tokens = tokens

    @uncompiled
    def run(self, q: Any, kv: Any, *, return_lse: bool = False, **inputs: Any) -> Any:
        """Attention of this rank's query rows over the keys of all ranks, which all must call.

        Args:
            q: [rows, num_q_heads, head_dim], this rank's rows, one request behind the other and
                each in order: `layout.indices(q_lens, rank)` of those of all ranks.
            kv: (k, v), each [tokens, num_kv_heads, dim], likewise by `kv_lens`.
            return_lse: return the log-sum-exp [rows, num_q_heads] too.
            **inputs: values of the variant's fields for this run.

        Returns:
            The output of this rank's rows, and the log-sum-exp if asked for.

        Raises:
            RankLost: a rank ended, or did not answer in time.
            OutOfStep: an earlier run failed after ranks had begun to exchange.
            NotPlanned: there is no plan, or the last one was refused.
            WrongShape: not as many keys as this rank has of the plan.
            As `AttentionWrapper.run`.
        """
        if self._tokens is None:
            raise NotPlanned()
        for name, given in zip("kv", kv, strict=True):
            if len(given) != self._tokens[self.rank]:
                expected = f"{self._tokens[self.rank]} tokens, this rank's of the plan"
                raise WrongShape(name=name, got=tuple(given.shape), expected=expected)
        held = [x.contiguous() for x in kv]
        self._check(q, held, inputs)
        attend = self._in_a_ring if self._is_ring else self._gathered
        with self._peers.in_step(), torch.no_grad():
            state = attend(q, held, inputs)
            out = state.out
            if self._epilogue is not None:
                out = self._epilogue.run(out, state.lse, 1, inputs)
        out = out.to(q.dtype)
        results: tuple[torch.Tensor, ...] = (out,)
        if return_lse:
            results = out, state.lse * self._lse_scale
        learnt = learnt_of(self._parts[0].wrapper, self._epilogue, (q, *kv), inputs)
        results = without_gradient(results, learnt)
        return results if return_lse else results[0]

    def _check(self, q: Any, held: list[torch.Tensor], inputs: dict[str, Any]) -> None:
        """Refuse what is wrong before any rank is sent something: a refused run may be repeated."""
        assert self._tokens is not None
        tokens = self._tokens[self.rank] if self._is_ring else sum(self._tokens)
        keys = [x.new_empty((1, *x.shape[1:])).expand(tokens, *x.shape[1:]) for x in held]
        self._parts[0].wrapper.check_run(q, tuple(keys), inputs)

    def _in_a_ring(self, q: Any, held: list[torch.Tensor], inputs: dict[str, Any]) -> States:
        assert self._tokens is not None
        state, after, before = None, (self.rank + 1) % self.world, (self.rank - 1) % self.world
        *others, last = self._parts
        for step, part in enumerate(others):
            tokens = self._tokens[(self.rank - step - 1) % self.world]
            coming = [x.new_empty((tokens, *x.shape[1:])) for x in held]
            exchange = self._peers.start({after: held}, {before: coming}, "keys and values")
            state = with_more(state, part.run(q, held, inputs), self._softmax)
            exchange.wait()
            held = coming
        return with_more(state, last.run(q, held, inputs), self._softmax)

    def _gathered(self, q: Any, held: list[torch.Tensor], inputs: dict[str, Any]) -> States:
        assert self._tokens is not None and self._whole_order is not None
        others = [rank for rank in range(self.world) if rank != self.rank]
        places = [[x.new_empty((n, *x.shape[1:])) for n in self._tokens] for x in held]
        receives = {rank: [parts[rank] for parts in places] for rank in others}
        exchange = self._peers.start(dict.fromkeys(others, held), receives, "keys and values")
        for parts, own in zip(places, held, strict=True):
            parts[self.rank].copy_(own)
        exchange.wait()
        return self._parts[0].run(q, [self._in_order(parts) for parts in places], inputs)

    def _in_order(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Tokens of all ranks in the order of the sequences; as bytes, which any type is."""
        whole = torch.cat([part.view(torch.uint8) for part in parts])
        assert self._whole_order is not None
        return whole.index_select(0, self._whole_order).view(parts[0].dtype)


def room_for_messages(wrapper: AttentionWrapper) -> dict[str, int]:
    """Options of a wrapper like this one while keys of other ranks come: it leaves SMs to NCCL.

    NCCL's kernel of a rank that came first holds SMs until the other sends. CTAs of attention that
    find none would begin when it ends, and so on around the ring. Only kernels that fill an SM
    with one CTA are known to wait so, and only those without a kernel for their keys before.
    """
    if wrapper.device.type != "cuda":
        return {}
    choices = wrapper.choices()  # none of the reference
    fills_an_sm = any(template_of(choice.tile) is HOPPER for choice in choices)
    if not fills_an_sm or any(choice.pretransformed_keys for choice in choices):
        return {}
    left = cuda_facts(wrapper.device.index).num_sms - _SMS_OF_MESSAGES
    return {"sm_limit": max(1, left)}  # a slice of a GPU may have fewer


class _Part:
    """Attention of this rank's queries to keys of one rank, or of all."""

    def __init__(self, variant: Placed, options: dict[str, Any]) -> None:
        self.variant = variant
        self.wrapper = AttentionWrapper(variant, kv_format=Ragged(), **options)
        self._placement = Placement(self.wrapper, options.get("bounds"))

    def plan(
        self,
        layout: Layout,
        ranks: tuple[int, int],
        q_lens: Ints,
        kv_lens: Ints,
        inputs: dict[str, Any],
    ) -> Ints:
        """Plan with keys of the second rank; returns the table of positions."""
        own_q = layout.local_len(q_lens, ranks[0])
        own_kv = layout.local_len(kv_lens, ranks[1]) if self.variant.keys else kv_lens
        self.variant.expected = (own_q, q_lens), (own_kv, kv_lens)
        rows = np.cumsum(q_lens) - q_lens
        table: Ints = table_of(self.variant, *ranks, kv_lens=kv_lens, q_lens=q_lens, q_rows=rows)
        with self._placement.given(table) as placed:
            self.wrapper.plan(as_indptr(own_q), as_indptr(own_kv), **inputs, **placed)
        return table

    def run(self, q: Any, held: list[torch.Tensor], inputs: dict[str, Any]) -> States:
        return States(*self.wrapper.run(q, tuple(held), return_lse=True, **inputs))


def ring_attention(q: Any, k: Any, v: Any, *, q_lens: Lengths, **options: Any) -> Any:
    """Ring attention by one call; `PrefillWrapper` plans once for all layers.

    Args:
        q, k, v: this rank's tokens, as of `PrefillWrapper.run`.
        q_lens: query rows of each request, on all ranks together.
        **options: `kv_lens`, `return_lse`, `variant`, `group`, `layout`, `timeout`, `lse_base`,
            `sm_scale`, and values of the variant's fields.

    Returns, and raises, what `PrefillWrapper.run` does.
    """
    return _by_one_call("ring", q, k, v, q_lens, options)


def all_gather_attention(q: Any, k: Any, v: Any, *, q_lens: Lengths, **options: Any) -> Any:
    """All-gather attention by one call; as `ring_attention`."""
    return _by_one_call("all_gather", q, k, v, q_lens, options)


def _by_one_call(
    method: Method, q: Any, k: Any, v: Any, q_lens: Lengths, options: dict[str, Any]
) -> Any:
    of_plan = {"kv_lens": options.pop("kv_lens", None)}
    of_run = {"return_lse": options.pop("return_lse", False)}
    names = ("variant", "group", "layout", "timeout", "lse_base", "sm_scale")
    declared = {name: options.pop(name) for name in names if name in options}
    wrapper = PrefillWrapper(
        method=method,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=q.dtype,
        kv_dtype=k.dtype,
        device=q.device,
        **declared,
    )
    wrapper.plan(q_lens, **of_plan, **options)
    return wrapper.run(q, (k, v), **of_run)


def _lengths(name: str, given: Any) -> Ints:
    lengths = np.asarray(given, np.int64)
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ArgumentError(name=name, reason=f"is {given!r}; expected one length per request")
    return lengths
