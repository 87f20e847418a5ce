"""What vLLM calls for each layer: write new keys and values to the cache, then attend."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.vllm.builder import StepMetadata
from warploom.engines.vllm.layers import CACHE_TYPES, Layer

_ELSE = "Serve this model with vLLM's own attention: take warploom out of VLLM_PLUGINS."


class LayerAttention(AttentionImpl[StepMetadata]):
    """Attention of one layer; vLLM makes it while a model loads, and it refuses what is missing."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **features: Any,
    ) -> None:
        """Take note of a layer.

        Args:
            num_heads, num_kv_heads: of this rank; the second defaults to the first.
            head_size: lanes of a head.
            scale: factor of q.k.
            alibi_slopes: one for each query head.
            sliding_window: keys that a query sees, its own included.
            kv_cache_dtype: vLLM's name for the type of the cache.
            logits_soft_cap: bound of the logits; None or 0 without.
            attn_type: what attends to what.
            kv_sharing_target_layer_name: the layer whose cache this one reads, and does not write.
            sinks: [num_heads] learned logits.
            **features: what other models ask for.

        Raises:
            UnsupportedByEngine: what the layer needs and warploom lacks.
        """
        _refuse(head_size, kv_cache_dtype, attn_type, features)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self._soft_cap = logits_soft_cap or None
        self._slopes = None if alibi_slopes is None else tuple(map(float, alibi_slopes))
        self.sinks = sinks
        # the same and the slopes in float32, as kernels read them
        self._given: dict[str, torch.Tensor] = {}
        stored = CACHE_TYPES[kv_cache_dtype]
        self._stored = None if stored is None else getattr(torch, stored)

    def described(self, name: str, model: Any) -> Layer:
        """The layer of this name in a model of this configuration."""
        return Layer(
            name=name,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            sm_scale=self.scale,
            window=self.sliding_window,
            soft_cap=self._soft_cap,
            alibi_slopes=self._slopes,
            has_sinks=self.sinks is not None,
            cache_dtype=self.kv_cache_dtype,
            model=model,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called again when weights are loaded again: what CUDA graphs read stays where it is."""
        if self.sinks is None:
            return
        sinks = self.sinks.detach().float()  # the weights themselves if they are of float32
        held = self._given.setdefault("sink", sinks)
        if held.data_ptr() != sinks.data_ptr():
            held.copy_(sinks)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens to the cache.

        Args:
            layer: has the scales of the cache.
            key, value: [rows or more, num_kv_heads, head_size].
            kv_cache: [pages, num_kv_heads, page_size, 2 * head_size].
            slot_mapping: int64 [rows], page * page_size + token in page; -1 writes nothing.
        """
        k_cache, v_cache = self._caches(kv_cache)
        if key.is_cpu:
            slots = slot_mapping
            rows = len(slots)
            kept = slots >= 0
            if not bool(kept.all()):
                slots, key, value = slots[kept], key[:rows][kept], value[:rows][kept]
                rows = len(slots)
            page, token = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
            _store(k_cache, page, token, key[:rows], layer._k_scale_float)
            _store(v_cache, page, token, value[:rows], layer._v_scale_float)
            return
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(
            key, value, k_cache.transpose(1, 2), v_cache.transpose(1, 2), slot_mapping,
            self.kv_cache_dtype, layer._k_scale, layer._v_scale,
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, in which the new tokens are already.

        Args:
            layer: the layer that this belongs to.
            query: [rows or more, num_heads, head_size].
            key, value: not read.
            kv_cache: see `do_kv_cache_update`.
            attn_metadata: the step; None in runs that measure memory.
            output: as query.
            output_scale, output_block_scale: None, since no fused quantisation is offered.

        Returns:
            `output`.
        """
        if attn_metadata is None:
            return output.zero_()
        kind = attn_metadata.kinds[layer.layer_name]
        if self._slopes is not None and "slopes" not in self._given:
            self._given["slopes"] = torch.tensor(self._slopes, device=query.device)
        inputs: dict[str, Any] = {
            name: value for name, value in self._given.items() if name in kind.names
        }
        if self._stored is not None and self._stored.itemsize == 1:
            inputs |= {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        kind.run(attn_metadata.step, query, self._caches(kv_cache), output, inputs)
        return output

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the cache, which lie side by side."""
        if self._stored is not None and kv_cache.dtype != self._stored:
            kv_cache = kv_cache.view(self._stored)
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


def _store(
    cache: torch.Tensor, page: torch.Tensor, token: torch.Tensor, new: torch.Tensor, scale: float
) -> None:
    """Write rows to a cache on the host, rounded to its type."""
    if cache.dtype.itemsize == 1:
        most = torch.finfo(cache.dtype).max
        new = (new.float() / scale).clamp(-most, most).to(cache.dtype)
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)  # which torch can index
    cache[page, :, token] = new


def _refuse(head_size: int, cache_dtype: str, attn_type: str, features: dict[str, Any]) -> None:
    wrong = {
        f"attention of type {getattr(attn_type, 'value', attn_type)!r}": (
            attn_type != AttentionType.DECODER,
            "only decoders are connected",
        ),
        f"heads of {head_size} lanes": (
            head_size % 8 != 0 or not 8 <= head_size <= 256,
            "kernels take multiples of 8 up to 256",
        ),
        f"a KV cache of type {cache_dtype!r}": (
            cache_dtype not in CACHE_TYPES,
            f"it reads {', '.join(CACHE_TYPES)}",
        ),
        f"layers with {', '.join(features)}": (bool(features), "warploom does not know it"),
    }
    for what, (is_wrong, reason) in wrong.items():
        if is_wrong:
            raise UnsupportedByEngine(what=what, engine="vLLM", reason=reason, remedy=_ELSE)
