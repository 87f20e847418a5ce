"""The wrappers that attend to a paged cache of transformers, planned once a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from warploom.dsl.types.formats import Paged, Ragged
from warploom.dsl.variants.variant import Variant
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.layers import AttentionLayer
from warploom.engines.transformers.steps import (
    Indptr,
    Step,
    bounds_by_rows,
    bounds_by_table,
    plans_on,
)
from warploom.engines.transformers.variants import OwnVariant
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds

_NO_GRAPHS = "Pass ContinuousBatchingConfig(use_cuda_graph=False)."


@dataclass(frozen=True)
class Call:
    """Queries of a layer [rows, q_heads, head_dim], and what it computes."""

    query: torch.Tensor
    layer: AttentionLayer
    sink: torch.Tensor | None
    own: OwnVariant | None

    @property
    def variant(self) -> Variant:
        return self.layer.variant if self.own is None else self.own.variant

    @property
    def inputs(self) -> dict[str, Any]:
        """Values of fields that the model has."""
        is_read = self.sink is not None and (self.own is None or self.own.reads_sink)
        return {"sink": self.sink} if is_read else {}

    @property
    def kind(self) -> Hashable:
        """Equal for calls that one plan serves."""
        layer, own = self.layer, self.own
        means = (layer.window, layer.soft_cap, layer.has_sinks) if own is None else own.key
        return means, layer.num_q_heads, layer.head_dim, layer.sm_scale


@dataclass
class _Planned:
    """A wrapper, and the step that it was planned for last."""

    wrapper: AttentionWrapper
    step: object = None
    tokens: Step | None = None  # where they are kept; None if transformers keeps them in a ring
    is_captured: bool = False  # the plan lies in a CUDA graph, and holds for its replays alone


@dataclass
class Attending:
    """The wrappers of one cache: one for each kind of layer and storage, planned once a step."""

    made: dict[Hashable, _Planned] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        call: Call,
        new: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Layers that keep all tokens read pages where they lie; others what the cache returns.

        A cache for sliding windows is a ring, whose oldest tokens the new ones overwrite. Its
        keys are put in order by transformers. Steps that only decode come with block tables on
        some devices, and without lists then.

        A step is captured after it has run once, so that nothing is compiled or allocated then;
        and it is planned again then, for its replays.
        """
        allocator = cache.layer_to_allocator[layer]
        page = allocator.tokens_per_page if _keeps_all(allocator, kwargs) else None
        if page is None:
            found = cache.update(*new, layer, dict(kwargs))
            k, v = (x[0].transpose(0, 1) for x in found)
        else:
            k, v = allocator.get_cache_for_block_table(layer)
        bounds = _bounds(call, page, cache, kwargs, k)
        is_captured = is_capturing(call.query.device)
        if is_captured and bounds is None:
            raise unsupported("a CUDA graph of this step", "the host plans it", _NO_GRAPHS)
        planned = self._wrapper(call, page, k.shape[-2], bounds)
        step = kwargs["read_index"]  # a new list in each step, the same in all of its layers
        if planned.step is not step or planned.is_captured != is_captured:
            planned.step = None  # in case that it is refused
            lists, planned.tokens = _read(allocator, page, kwargs, len(call.query))
            planned.wrapper.plan(*lists, q_rows=len(call.query))
            planned.step, planned.is_captured = step, is_captured
        if planned.tokens is not None:
            for stored, tokens in zip((k, v), new, strict=True):
                planned.tokens.write(stored, tokens[0].transpose(0, 1))
        out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        planned.wrapper.run(call.query, (k, v), out=out, **call.inputs)
        return out

    def _wrapper(
        self, call: Call, page: int | None, kv_heads: int, bounds: Bounds | None
    ) -> _Planned:
        key = (page, kv_heads, call.kind, bounds)
        if key not in self.made:
            layer = call.layer
            wrapper = AttentionWrapper(
                call.variant, kv_format=Ragged() if page is None else Paged(page),
                num_q_heads=layer.num_q_heads, num_kv_heads=kv_heads, head_dim=layer.head_dim,
                sm_scale=layer.sm_scale, dtype=call.query.dtype, device=call.query.device,
                bounds=bounds, cuda_graph=bounds is not None,
            )  # fmt: skip
            self.made[key] = _Planned(wrapper)
        return self.made[key]


_ATTENDING: WeakKeyDictionary[Any, Attending] = WeakKeyDictionary()


def of_cache(cache: Any) -> Attending:
    found = _ATTENDING.get(cache)
    if found is None:
        found = _ATTENDING[cache] = Attending()
    return found


def _keeps_all(allocator: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a layer's cache keeps all tokens."""
    return kwargs.get("block_table") is not None or allocator.layer_type == "full_attention"


def _read(
    allocator: Any, page: int | None, kwargs: dict[str, Any], rows: int
) -> tuple[tuple[Any, ...], Step | None]:
    """Arguments of `plan`, and where new tokens go if we write them."""
    kv = kwargs["cu_seq_lens_k"][allocator.layer_type]
    indptr = Indptr(kwargs["cu_seq_lens_q"], kv)
    if page is None:
        return indptr.filled(rows), None
    tables = kwargs.get("block_table")
    if tables is not None:
        step = Step.of_table(kv, tables[allocator.index], page)
    else:
        read, write = (kwargs[f"{name}_index"][allocator.index] for name in ("read", "write"))
        step = Step.of_places(indptr, read, write, page)
    return step.lists, step


def _bounds(
    call: Call, page: int | None, cache: Any, kwargs: dict[str, Any], keys: torch.Tensor
) -> Bounds | None:
    """Those of steps that a device plans by itself; None where each batch has its own tile.

    A device plans steps that only decode, and those that transformers may capture: these it has
    filled up, and says that one request could have all rows. Other steps have other sizes each.
    """
    if not plans_on(call.query.device):
        return None
    tables, rows = kwargs.get("block_table"), len(call.query)
    if tables is not None:
        assert page is not None
        return bounds_by_table(tables[0], page)
    if kwargs["max_length_q"] != rows:
        return None
    requests, group_size = len(kwargs["cu_seq_lens_q"]) - 1, call.query.shape[1] // keys.shape[-2]
    most = cache.max_tokens_read + cache.max_batch_tokens
    return bounds_by_rows(requests, rows, most, group_size, page)


def unsupported(
    what: str, reason: str, remedy: str = "Load the model with attn_implementation='sdpa'."
) -> UnsupportedByEngine:
    """What continuous batching cannot have."""
    engine = "transformers' continuous batching"
    return UnsupportedByEngine(what=what, engine=engine, reason=reason, remedy=remedy)
