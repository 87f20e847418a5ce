"""`flex_attention` with torch's signature, for code that calls torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warploom.dsl.values.stand_ins import uncompiled
from warploom.dsl.variants.capture import writes
from warploom.dsl.variants.flex import flex
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError
from warploom.runtime.calls.attention import attention
from warploom.runtime.inputs.aux_outputs import AuxRequest

# An attribute of a score_mod or a block mask: the variants that were made of it. They live as long
# as it does, and no longer.
_VARIANTS = "_warploom_flex"
_MOST_VARIANTS = 8  # of one block mask, with as many score_mods
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@uncompiled(
    "warploom.flex_attention makes its own kernel: leave torch.compile out, or, inside of a larger "
    "compiled function, call warploom.attention with a warploom.flex made before"
)
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch's `flex_attention` by warploom's kernels: `attention` of `flex` in layout HND.

    A `score_mod` and a `block_mask` are traced at their first call (milliseconds), and again when
    what they read has changed. Under torch.compile it runs as it is, outside of the graph. There
    are no gradients.

    Args:
        query: [batch, q_heads, rows, head_dim].
        key: [batch or 1, kv_heads, keys, head_dim], in query's dtype.
        value: [batch or 1, kv_heads, keys, head_dim_v], likewise.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`, as `flex` takes it.
        block_mask: of torch's `create_block_mask`, for these lengths. Its lists are read again only
            if torch counts a write to them.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
        enable_gqa: whether q_heads may be a multiple of kv_heads.
        return_lse: return the natural log-sum-exp too.
        kernel_options: torch's, for its Triton kernels; without effect.
        return_aux: what to return in an `AuxOutput`, in place of `return_lse`.

    Returns:
        The output, [batch, q_heads, rows, head_dim_v]; with `return_lse` also the log-sum-exp,
        float32 [batch, q_heads, rows]; with `return_aux` an `AuxOutput`. Rows that see nothing have
        output 0 and log-sum-exp -inf.

    Raises:
        ArgumentError: fewer key/value heads without `enable_gqa`, or a block mask of other lengths.
        What `flex` and `attention` raise.
    """
    heads = [int(x.shape[1]) for x in (query, key) if len(getattr(x, "shape", ())) == 4]
    if not enable_gqa and len(set(heads)) > 1:
        reason = f"has {heads[1]} heads and query {heads[0]}; say enable_gqa=True"
        raise ArgumentError(name="key", reason=reason)
    return attention(
        query, key, value, variant=_variant(score_mod, block_mask), sm_scale=scale,
        return_lse=return_lse, return_aux=return_aux, layout="HND",
    )  # fmt: skip


def _variant(score_mod: Callable[..., Any] | None, block_mask: Any) -> Variant | None:
    """The variant of both, kept with the mask, or else with the function."""
    owner = score_mod if block_mask is None else block_mask
    if owner is None:
        return None
    lists = tuple(writes(getattr(block_mask, name, None)) for name in _LISTS)
    known: list[tuple[Any, Any, Variant]] = getattr(owner, "__dict__", {}).get(_VARIANTS, [])
    for of, written, variant in known:
        if of is score_mod and written == lists:
            return variant
    made = flex(score_mod, block_mask=block_mask)
    kept = [(score_mod, lists, made), *known[: _MOST_VARIANTS - 1]]
    if hasattr(owner, "__dict__"):
        setattr(owner, _VARIANTS, kept)
    return made
