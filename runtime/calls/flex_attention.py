"""`flex_attention` with torch's signature, for code that calls torch's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from warploom.dsl.values.stand_ins import uncompiled
from warploom.dsl.variants.capture import writes
from warploom.dsl.variants.fingerprint import fingerprint
from warploom.dsl.variants.flex import flex
from warploom.dsl.variants.variant import Variant
from warploom.error_base import WarploomError
from warploom.error_words import renamed
from warploom.errors import ArgumentError
from warploom.runtime.calls.attention import attention
from warploom.runtime.inputs.aux_outputs import AuxRequest

# An attribute of a score_mod or a block mask: the variants that were made of it. They live as long
# as it does, and no longer.
_VARIANTS = "_warploom_flex"
_MOST_VARIANTS = 16  # of one block mask, with as many score_mods
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

# what `attention` calls its arguments -> what torch's function calls them, alone and in texts
_NAMES = {"q": "query", "k": "key", "v": "value"}
_TEXTS = {
    **{f"as {mine}": f"as {theirs}" for mine, theirs in _NAMES.items()},
    **{"k's": "key's", "q and k": "query and key", "if v is": "if value is"},
    **{"sm_scale": "scale", "head_dim_v": "value's head_dim"},
    "4 dimensions, HND": "[batch, heads, tokens, dim]",
}


@dataclass(frozen=True)
class _Parts:
    """What a variant is made of.

    Attributes:
        objects: the score_mod, the mask_mod, and the block mask's lists; None where there is none.
        written: how often torch had written to each list.
        read: the key of what the mask_mod reads, which decides whether the lists are read.
    """

    objects: tuple[Any, ...]
    written: tuple[int | None, ...]
    read: Hashable

    @classmethod
    def of(cls, score_mod: Any, block_mask: Any) -> _Parts:
        lists = tuple(getattr(block_mask, name, None) for name in _LISTS)
        mask_mod = getattr(block_mask, "mask_mod", None)
        read = None if mask_mod is None else fingerprint(mask_mod)[0]
        return cls((score_mod, mask_mod, *lists), tuple(map(writes, lists)), read)

    @property
    def tell_of_changes(self) -> bool:
        """Whether writes to all lists, and what the mask_mod reads, can be compared."""
        _, mask_mod, *lists = self.objects
        of_lists = zip(lists, self.written, strict=True)
        is_counted = all(one is None or count is not None for one, count in of_lists)
        return is_counted and (mask_mod is None or self.read is not None)

    def are_those_of(self, other: _Parts) -> bool:
        """Whether a variant of the one is one of the other; Python makes bound methods anew."""
        same = (
            x is y or (isinstance(x, MethodType) and x == y)
            for x, y in zip(self.objects, other.objects, strict=True)
        )
        return all(same) and (self.written, self.read) == (other.written, other.read)


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
        block_mask: of torch's `create_block_mask`, for these lengths. Its lists are read again if
            they are other tensors, or torch has counted a write to them.
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
        ArgumentError: fewer key/value heads without `enable_gqa`, a block mask of other lengths, or
            a function in its place.
        What `flex` and `attention` raise.
    """
    if isinstance(block_mask, FunctionType):
        reason = "is a function; give torch's create_block_mask(function, ...), or call "
        remedy = "attention(..., variant=warploom.flex(score_mod, function), layout='HND')"
        raise ArgumentError(name="block_mask", reason=reason + remedy)
    heads = [int(x.shape[1]) for x in (query, key) if len(getattr(x, "shape", ())) == 4]
    if not enable_gqa and len(set(heads)) > 1:
        reason = f"has {heads[1]} heads and query {heads[0]}; say enable_gqa=True"
        raise ArgumentError(name="key", reason=reason)
    variant = _variant(score_mod, block_mask)
    try:
        return attention(
            query, key, value, variant=variant, sm_scale=scale, return_lse=return_lse,
            return_aux=return_aux, layout="HND",
        )  # fmt: skip
    except WarploomError as error:
        told = renamed(error, _TEXTS, _NAMES)  # captured tensors have none of these names
        if told is None:
            raise
        raise told from error


def _variant(score_mod: Callable[..., Any] | None, block_mask: Any) -> Variant | None:
    """The variant of both, kept with the mask, or else with the function."""
    if score_mod is None and block_mask is None:
        return None
    parts = _Parts.of(score_mod, block_mask)
    kept = _kept_with(score_mod if block_mask is None else block_mask)
    if kept is None or not parts.tell_of_changes:
        return flex(score_mod, block_mask=block_mask)
    known: list[tuple[_Parts, Variant]] = list(kept.get(_VARIANTS, ()))
    found = next((one for one in known if one[0].are_those_of(parts)), None)
    if found is None:
        found = parts, flex(score_mod, block_mask=block_mask)
    others = [one for one in known if one is not found]
    kept[_VARIANTS] = (found, *others[: _MOST_VARIANTS - 1])
    return found[1]


def _kept_with(owner: Any) -> dict[str, Any] | None:
    """The attributes of the object that variants are kept with, or None if it has none."""
    if isinstance(owner, MethodType):
        owner = owner.__self__
    kept = getattr(owner, "__dict__", None)
    return kept if isinstance(kept, dict) else None
