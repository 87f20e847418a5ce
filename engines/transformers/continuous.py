"""What transformers calls for each layer, in a step of continuous batching or in any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.engines.layers import AttentionLayer
from warploom.engines.transformers.masks import MaskOnDemand
from warploom.engines.transformers.packs import Pack, pack_of, without_pack
from warploom.engines.transformers.variants import OwnVariant, OwnVariants
from warploom.engines.transformers.wrappers import Call, of_cache, unsupported
from warploom.runtime.calls import huggingface

_attend: Callable[..., tuple[torch.Tensor, None]] = huggingface.attention_forward


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

    Without a cache, attend as `attn_implementation="warploom"` does, and to packs besides.

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
        cache: the `PagedAttentionCache`, in continuous batching.
        own_variants: those of the user's that `register` was given.
        **kwargs: lengths and indices of the step, or where sequences of a pack begin.

    Returns:
        [1, rows, q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedByEngine: dropout, a mask or a variant that reads at.batch beside the paged
            cache, or a CUDA graph of a step that no device plans.
    """
    means: dict[str, Any] = {
        "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux,
        "dropout": dropout, **kwargs,
    }  # fmt: skip
    if cache is not None:
        mask = None if isinstance(attention_mask, MaskOnDemand) else attention_mask
        qkv = query, key, value
        return _paged_uncompiled(module, qkv, mask, means, cache, own_variants), None
    own = None
    if own_variants is not None:
        chosen = own_variants.of(module, _described(module, query, key, means))
        own = None if chosen is None else (chosen.variant, chosen.beside_padding)
    pack = _pack_of(module, query, key, attention_mask, sliding_window, kwargs)
    if pack is None:
        mask = attention_mask.made() if isinstance(attention_mask, MaskOnDemand) else attention_mask
        return _attend(module, query, key, value, mask, own=own, **means)
    sizes, means = (pack.rows, pack.keys, pack.keys), without_pack(means)
    parts = (torch.split(x, of, 2) for x, of in zip((query, key, value), sizes, strict=True))
    found = [_attend(module, *qkv, None, own=own, **means)[0] for qkv in zip(*parts, strict=True)]
    return torch.cat(found, 1), None


def _pack_of(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | MaskOnDemand | None,
    window: int | None,
    kwargs: dict[str, Any],
) -> Pack | None:
    """The sequences of one entry, if no mask tells them apart."""
    if len(query) != 1 or isinstance(mask, torch.Tensor):
        return None
    if mask is not None and not mask.is_known(window):  # whatever else it hides
        return None
    causal = mask is not None or _is_causal(module, kwargs)
    return pack_of(kwargs, query.shape[2], key.shape[2], causal)


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _paged(
    module: Any,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    means: dict[str, Any],
    cache: Any,
    own_variants: OwnVariants | None,
) -> torch.Tensor:
    query, *new = qkv
    layer = _described(module, query, new[0], means)
    own = None if own_variants is None else own_variants.of(module, layer)
    _refuse(layer, means["dropout"], mask, own)
    if any(x.shape[3] % 8 for x in qkv):
        raise unsupported(f"heads of {query.shape[3]} lanes", "kernels take multiples of 8")
    sink = None if means["s_aux"] is None else means["s_aux"].float()
    call = Call(query[0].transpose(0, 1), layer, sink, own)
    return of_cache(cache).attend(module.layer_idx, call, (new[0], new[1]), cache, means)[None]


_disable: Any = torch.compiler.disable  # which is not typed
_paged_uncompiled: Callable[..., torch.Tensor] = _disable(_paged)  # it plans and launches


def _described(
    module: Any, query: torch.Tensor, key: torch.Tensor, means: dict[str, Any]
) -> AttentionLayer:
    index, scaling = getattr(module, "layer_idx", None), means["scaling"]
    return AttentionLayer(
        name=type(module).__name__ + ("" if index is None else f".{index}"),
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        sm_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        is_causal=_is_causal(module, means),
        window=means["sliding_window"],
        soft_cap=means["softcap"],
        has_sinks=means["s_aux"] is not None,
        model=getattr(module, "config", None),
    )


def _refuse(
    layer: AttentionLayer, dropout: float, mask: torch.Tensor | None, own: OwnVariant | None
) -> None:
    if not layer.is_causal:
        raise unsupported(f"{layer.name}, which is not causal", "its steps are")
    if dropout != 0.0:
        raise unsupported("dropout", "it serves inference")
    if mask is not None:
        raise unsupported("a mask of the caller's", "requests see what their model says")
    if own is not None and own.tells_requests_apart:
        reason = "its steps hold any requests, in any order"
        raise unsupported("a variant that reads at.batch", reason, "Call generate.")
