"""Hugging Face transformers: warploom as an attention implementation, with matching masks.

transformers calls `AttentionMaskInterface` once per forward pass, and `AttentionInterface` once per
layer. Causal, windowed and padded masks are passed as None or as the padding of the keys, and turn
into variants. Other masks are passed as the boolean [batch, 1, queries, keys] that sdpa would get.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, MissingPackage, UnsupportedSpec
from warploom.runtime.calls.attention import attention

NAME = "warploom"


class KeyPadding(Variant):
    """Hides keys for which `unpadded_keys` is False."""

    unpadded_keys = Tensor("bool", ("batch", "kv_pos"))  # no variant combined with it has this name

    def logits_mask(self, at: Position) -> Value:
        return self.unpadded_keys[at.batch, at.kv_pos]


class ElementMask(Variant):
    """Shows the elements for which `visible` is True."""

    visible = Tensor("bool", ("batch", "q_head", None, "kv_pos"))

    def logits_mask(self, at: Position) -> Value:
        return self.visible[at.batch, at.q_head, at.q_idx, at.kv_pos]


class ElementBias(Variant):
    """Adds `bias` to the logits: additive masks and learned position biases."""

    bias = Tensor("float32", ("batch", "q_head", None, "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.bias[at.batch, at.q_head, at.q_idx, at.kv_pos]


# Every combination of these is made at import: torch.compile can look variants up, not make them.
_PARTS: dict[str, Variant] = {
    "causal": Causal(),
    "window": SlidingWindow(-1),
    "cap": SoftCap(1.0),
    "unpadded_keys": KeyPadding(),
    "visible": ElementMask(),
    "bias": ElementBias(),
    "sink": AttentionSink(),
}


def _compose(chosen: tuple[bool, ...]) -> Variant:
    made: Variant | None = None
    for part, wanted in zip(_PARTS.values(), chosen, strict=True):
        if wanted:
            made = part if made is None else made & part
    return Variant() if made is None else made


_VARIANTS = {chosen: _compose(chosen) for chosen in product((False, True), repeat=len(_PARTS))}


def register_huggingface(name: str = NAME) -> None:
    """Make `attn_implementation="warploom"` known to transformers.

    Args:
        name: another name to register under.

    Raises:
        ArgumentError: the name is no string, or empty.
        MissingPackage: transformers is not installed, or has no mask interface.
    """
    if not isinstance(name, str) or not name:
        reason = f"is {name!r}; expected the name that models give as attn_implementation"
        raise ArgumentError(name="name", reason=reason)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from warploom.runtime.calls.huggingface_masks import make_mask
    except ImportError as error:
        raise MissingPackage(
            what="register_huggingface()", package="transformers", requirement="transformers>=5"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    own: tuple[Variant, Variant] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer; `is_causal` is read from it if it is not given.
        query: [batch, q_heads, rows, head_dim].
        key, value: [batch, kv_heads, keys, head_dim]; heads are not repeated.
        attention_mask: what `make_mask` returned, or a mask of the user's: bool or additive
            [batch or 1, heads or 1, rows, keys].
        dropout: must be 0.
        scaling: factor of q.k; 1/sqrt(head_dim) by default.
        is_causal: ignored if the mask covers all rows and keys.
        sliding_window: number of keys that a query sees, its own included.
        softcap: bound of the logits.
        s_aux: [q_heads] learned sink logits.
        position_bias: [batch or 1, heads, rows, keys] added to the logits.
        own: the user's variant in place of causality, window, cap and sinks, and that variant &
            `KeyPadding()`.

    Returns:
        [batch, rows, q_heads, head_dim_v], and None for the weights.

    Raises:
        UnsupportedSpec: dropout, weights as output, the paged cache of continuous batching, or a
            user's variant beside a mask of all rows and keys or a position bias.
    """
    _refuse(dropout, kwargs)
    full_mask = attention_mask is not None and attention_mask.dim() == 4
    if own is not None:
        if full_mask or position_bias is not None:
            raise _own_beside_mask()
        variant = own[0] if attention_mask is None else own[1]
        inputs = _mask_inputs(attention_mask, query, key)
        if s_aux is not None and reads_sink(variant):
            inputs["sink"] = s_aux.float()
        return _padded_attention(query, key, value, variant, scaling, inputs), None
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    inputs = _mask_inputs(attention_mask, query, key)
    if position_bias is not None:
        added = inputs.get("bias", 0.0) + position_bias[..., : key.shape[2]].float()
        inputs["bias"] = added.expand(query.shape[0], query.shape[1], -1, -1)
    causal = is_causal and not full_mask
    if causal and sliding_window is not None:
        inputs["left"] = sliding_window - 1
    if softcap is not None:
        inputs["cap"] = float(softcap)
    if s_aux is not None:
        inputs["sink"] = s_aux.float()
    chosen = (causal, "left" in inputs, *(name in inputs for name in _NAMES[2:]))
    out = _padded_attention(query, key, value, _VARIANTS[chosen], scaling, inputs)
    return out, None


_NAMES = tuple(_PARTS)


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    wrong = {
        "dropout": (dropout != 0.0, "warploom serves inference", "Call model.eval()."),
        "output_attentions": (
            bool(kwargs.get("output_attentions")),
            "weights are never stored",
            "Load the model with attn_implementation='eager' to see them.",
        ),
        "continuous batching": (
            kwargs.get("cache") is not None,
            "its paged cache is served under another name",
            "Call warploom.engines.transformers.register() and take 'warploom_flash'.",
        ),
    }
    for what, (is_wrong, reason, remedy) in wrong.items():
        if is_wrong:
            raise UnsupportedSpec(what=what, reason=reason, remedy=remedy)


def reads_sink(variant: Variant) -> bool:
    """Whether the variant reads the model's sinks, as `AttentionSink()` does."""
    return "sink" in variant.fields() and "sink" not in variant.inputs()


def _own_beside_mask() -> UnsupportedSpec:
    return UnsupportedSpec(
        what="a variant of your own beside a mask of all rows and keys",
        reason="such masks hide where in the sequence a row lies, as those of static caches do",
        remedy="Generate with a dynamic cache, or by continuous batching.",
    )


def _mask_inputs(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> dict[str, Any]:
    """A mask as an input of the variant that reads it."""
    if mask is None:
        return {}
    keys = key.shape[2]
    if mask.dim() == 2:
        return {"unpadded_keys": mask[:, -keys:].bool()}
    mask = mask[..., :keys].expand(query.shape[0], query.shape[1], query.shape[2], keys)
    return {"visible": mask} if mask.dtype == torch.bool else {"bias": mask.float()}


def _padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    variant: Variant,
    scaling: float | None,
    inputs: dict[str, Any],
) -> torch.Tensor:
    """`attention`, with head dimensions padded to multiples of 8: zeros change no product."""
    dim, dim_v = query.shape[3], value.shape[3]
    scaling = dim**-0.5 if scaling is None else scaling
    q, k, v = (
        torch.nn.functional.pad(x, (0, -x.shape[3] % 8)) if x.shape[3] % 8 else x
        for x in (query, key, value)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention(q, k, v, variant=variant, sm_scale=scaling, **inputs)
    out = out if out.shape[3] == dim_v else out[..., :dim_v]
    # contiguous as from transformers' own functions; a partly rotated q is stored by heads
    return out.contiguous()  # type: ignore[no-any-return]
