"""What transformers calls for each layer of a step of continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from warploom.dsl.types.formats import Paged, Ragged
from warploom.dsl.variants.variant import Variant
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.layers import AttentionLayer
from warploom.engines.transformers.masks import MaskOnDemand
from warploom.engines.transformers.steps import (
    Indptr,
    Step,
    bounds_by_rows,
    bounds_by_table,
    plans_on,
)
from warploom.engines.transformers.variants import OwnVariant, OwnVariants
from warploom.runtime.calls import huggingface
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.bounds import Bounds

_NO_GRAPHS = "Pass ContinuousBatchingConfig(use_cuda_graph=False)."


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskOnDemand | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    own_variants: OwnVariants | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new tokens of a step to the paged cache, and attend to it.

    Args:
        module: the layer.
        query: [1, q_heads, rows, head_dim], the rows of all requests.
        key, value: [1, kv_heads, rows, head_dim].
        attention_mask: what `make_mask_or_none` returned; without effect in continuous batching.
        dropout: must be 0.
        scaling: factor of q.k; 1/sqrt(head_dim) by default.
        sliding_window: keys that a query sees, its own included.
        softcap: bound of the logits.
        s_aux: [q_heads] learned sink logits.
        cache: the `PagedAttentionCache`; without one this is `attn_implementation="warploom"`.
        own_variants: those of the user's that `register` was given.
        **kwargs: lengths and indices of the step, from transformers.

    Returns:
        [1, rows, q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedByEngine: dropout, a mask or a variant that reads at.batch beside the paged
            cache, or a CUDA graph of a step that no device plans.
    """
    means: dict[str, Any] = {
        "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux
    }  # fmt: skip
    if cache is not None:
        mask = None if isinstance(attention_mask, MaskOnDemand) else attention_mask
        call = module, query, key, value, mask, dropout, own_variants, means, cache, kwargs
        return _paged_uncompiled(*call), None
    mask = attention_mask.made() if isinstance(attention_mask, MaskOnDemand) else attention_mask
    own = None
    if own_variants is not None:
        chosen = own_variants.of(module, _described(module, query, key, **means))
        own = None if chosen is None else (chosen.variant, chosen.beside_padding)
    means.update(kwargs, dropout=dropout, own=own)
    return huggingface.attention_forward(module, query, key, value, mask, **means)


def _paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    own_variants: OwnVariants | None,
    means: dict[str, Any],
    cache: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    layer = _described(module, query, key, **means)
    own = None if own_variants is None else own_variants.of(module, layer)
    _refuse(dropout, mask, own)
    if value.shape[3] % 8 or query.shape[3] % 8:
        raise _unsupported(f"heads of {query.shape[3]} lanes", "kernels take multiples of 8")
    sink = None if means["s_aux"] is None else means["s_aux"].float()
    call = _Call(query[0].transpose(0, 1), layer, sink, own)
    return _of_cache(cache).attend(module.layer_idx, call, (key, value), cache, kwargs)[None]


_disable: Any = torch.compiler.disable  # which is not typed
_paged_uncompiled: Callable[..., torch.Tensor] = _disable(_paged)  # it plans and launches


def _described(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> AttentionLayer:
    return AttentionLayer(
        name=f"layers.{getattr(module, 'layer_idx', None)}",
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        sm_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        has_sinks=s_aux is not None,
        model=getattr(module, "config", None),
    )


@dataclass(frozen=True)
class _Call:
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
class _Attending:
    """The wrappers of one cache: one for each kind of layer and storage, planned once a step."""

    made: dict[Hashable, _Planned] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        call: _Call,
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
        is_captured = _is_captured(call.query)
        if is_captured and bounds is None:
            raise _unsupported("a CUDA graph of this step", "the host plans it", _NO_GRAPHS)
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
        self, call: _Call, page: int | None, kv_heads: int, bounds: Bounds | None
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


_ATTENDING: WeakKeyDictionary[Any, _Attending] = WeakKeyDictionary()


def _of_cache(cache: Any) -> _Attending:
    found = _ATTENDING.get(cache)
    if found is None:
        found = _ATTENDING[cache] = _Attending()
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
    call: _Call, page: int | None, cache: Any, kwargs: dict[str, Any], keys: torch.Tensor
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


def _refuse(dropout: float, mask: torch.Tensor | None, own: OwnVariant | None) -> None:
    if dropout != 0.0:
        raise _unsupported("dropout", "it serves inference")
    if mask is not None:
        raise _unsupported("a mask of the caller's", "requests see what their model says")
    if own is not None and own.tells_requests_apart:
        reason = "its steps hold any requests, in any order"
        raise _unsupported("a variant that reads at.batch", reason, "Call generate.")


def _is_captured(query: torch.Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _unsupported(
    what: str, reason: str, remedy: str = "Load the model with attn_implementation='sdpa'."
) -> UnsupportedByEngine:
    engine = "transformers' continuous batching"
    return UnsupportedByEngine(what=what, engine=engine, reason=reason, remedy=remedy)
