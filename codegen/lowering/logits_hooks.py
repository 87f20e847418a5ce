"""The hooks on logits in a form that leaves the inner loop little, and what is kept for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.codegen.lowering.conjunction import few_tests
from warploom.codegen.lowering.key_bits import known_parts, of_bounds
from warploom.codegen.lowering.linear_bias import LinearBias, without_linear_bias
from warploom.codegen.lowering.logits_scale import with_scale_outside
from warploom.codegen.lowering.split import Split, split, with_float_distances, with_reciprocals
from warploom.codegen.sizes import round_up
from warploom.dsl.graphs import fold
from warploom.dsl.masks.open_part import mask_parts
from warploom.dsl.types.ir import Kind, Node
from warploom.dsl.types.spec import SCALAR_HOOKS, TracedVariant

Language = Literal["cuda", "cpp"]


@dataclass(frozen=True)
class LogitsHooks:
    """What kernels compute of `logits_transform` and `logits_mask`.

    Attributes:
        roots: by hook; the mask's open part is one more.
        states: what is kept of a tile, a row and a column.
        is_of_bounds: the mask is one for `key_bits.bits_text`.
        factor: of transformed logits, where GPU kernels leave it to the softmax.
        bias: a term of transformed logits, where they leave it to the softmax. If nothing else is
            left of the transform, it is not among the roots.
    """

    roots: dict[str, Node]
    states: Split
    factor: Node | None = None
    bias: LinearBias | None = None
    is_of_bounds: bool = False


def logits_hooks(
    variant: TracedVariant,
    language: Language = "cuda",
    shifts_rows: bool = False,
    joins_keys: bool = False,
) -> LogitsHooks:
    """Take the hooks on logits apart.

    Args:
        variant: whose hooks.
        language: of the kernel.
        shifts_rows: whether the softmax adds a bias that grows evenly from key to key.
        joins_keys: whether masks of bounds are worked out for many keys at once.
    """
    found = {hook: variant.hooks[hook] for hook in SCALAR_HOOKS if hook in variant.hooks}
    factor = bias = bounds = None
    if "logits_mask" in found:
        if joins_keys:
            bounds = of_bounds(few_tests(found["logits_mask"]))
        tensors = frozenset(field.name for field in variant.tensors)
        whole = found["logits_mask"]
        found |= _mask_in_parts(whole, tensors) if bounds is None else {"logits_mask": bounds}
    if "logits_transform" in found:
        mask = [root for hook, root in found.items() if hook == "logits_mask"]
        transform = with_reciprocals(found["logits_transform"], mask)
        transform = with_float_distances(transform)
        if language == "cuda":
            outside, transform = with_scale_outside(transform, variant.softmax)
            factor = outside if variant.softmax else None
        if shifts_rows:
            transform, bias = without_linear_bias(transform)
        found["logits_transform"] = transform
        if transform.op == "logits" and bias is not None:
            del found["logits_transform"]
    kept = () if bias is None else (bias.slope,)
    if bounds is not None:
        kept = *kept, *known_parts(bounds)
    parts = [root for root in found.values() if root is not bounds]
    states = split((*parts, *kept))
    return LogitsHooks(found, states, factor, bias, bounds is not None)


def _mask_in_parts(mask: Node, tensors: frozenset[str]) -> dict[str, Node]:
    parts = mask_parts(mask, tensors)
    if parts is None:
        return {"logits_mask": few_tests(mask)}
    left_open = few_tests(parts.open)  # a part of the whole, so that states keep it once
    return {"logits_mask": fold.both(few_tests(parts.decided), left_open), "open_part": left_open}


def column_state_bytes(
    variant: TracedVariant,
    bytes_of_columns: bool = False,
    shifts_rows: bool = False,
    joins_keys: bool = False,
) -> int:
    """Size of the C++ `Variant::ColState`; 0 if there is nothing to keep of a column."""
    hooks = logits_hooks(variant, shifts_rows=shifts_rows, joins_keys=joins_keys)
    members = hooks.states.column
    sizes = [1 if bytes_of_columns and node.kind is Kind.BOOL else 4 for node in members]
    end = 0
    for size in sizes:
        end = round_up(end, size) + size
    return round_up(end, max(sizes, default=1))
