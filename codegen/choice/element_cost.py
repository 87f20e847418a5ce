"""About how many instructions an element of the logits takes beside the softmax.

Counted in the graph that kernels are made from, with weights that were fitted to 42 variants on an
H200 (docs/experiments/masks.md, "What functors of one's own cost").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, reduce

import numpy as np

from warploom.codegen.lowering.logits_hooks import logits_hooks
from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.lowering.split import Level, levels
from warploom.dsl.graphs import fold
from warploom.dsl.masks.intervals import PARTIAL, SKIP, TileAnalysis
from warploom.dsl.masks.open_part import decided_and_open
from warploom.dsl.types.ir import BITWISE, COMPARISONS, LEAVES, UNARY_MATH, Kind, Node, walk
from warploom.dsl.types.spec import TracedVariant

# Instructions of an operation, 1 if not listed. Those of special functions issue more slowly; a
# load of an element of its own takes a request for each few lanes.
_INSTRUCTIONS = dict.fromkeys(UNARY_MATH, 3) | {
    **dict.fromkeys(LEAVES | {"abs", "neg", "select"}, 0),  # parts of the operation that uses them
    **dict.fromkeys(BITWISE - {"shl", "shr"} | {"and", "or", "not"}, 0),  # parts of a comparison
    **dict.fromkeys(("floor", "ceil", "to_int", "to_float", "cast", "div"), 4),
    **dict.fromkeys(("pow", "sigmoid"), 6),
    **dict.fromkeys(("floordiv", "mod", "fmod", "call"), 14),
    "load": 16,
}
_WHOLE_NUMBERS = 2  # instructions on whole numbers issue at half the rate of those on floats
_HIDING = 2  # a predicate and a selection
_SAMPLE, _TILE = 4096, 128  # keys of the sample by which a mask is judged; rows and keys of a tile


@lru_cache(64)
def instructions_of_element(variant: TracedVariant) -> int:
    """Instructions of the logits transform, and of the mask if most tiles must test it.

    A multiply-add is one. Values that are constant along a row or a column are computed once for
    it, and what the softmax absorbs (a scale, a bias that grows linearly with the key) costs
    nothing.
    """
    alone = only_hooks(variant, ("logits_transform", "logits_mask"))
    hooks = logits_hooks(replace(alone, softmax=variant.softmax), shifts_rows=variant.softmax)
    transform, mask = hooks.roots.get("logits_transform"), _tested(variant, hooks.roots)
    found = _counted([root for root in (transform, mask) if root is not None])
    found += _HIDING if mask is not None else 0
    return found if variant.softmax else max(0, found - _INSTRUCTIONS["exp"])


def _counted(roots: list[Node]) -> int:
    computed = {node for node, level in levels(roots).items() if level is Level.ELEMENT}
    sums = (node.args for node in computed if node.op in ("add", "sub"))
    fused = {next((arg for arg in args if arg.op == "mul"), None) for args in sums} & computed
    return sum(_weight(node) for node in computed - fused)


def _weight(node: Node) -> int:
    of_whole_numbers = node.args[0].kind if node.op in COMPARISONS else node.kind
    found = _INSTRUCTIONS.get(node.op, 1)
    return _WHOLE_NUMBERS if found == 1 and of_whole_numbers is Kind.INT else found


def _tested(variant: TracedVariant, roots: Mapping[str, Node]) -> Node | None:
    """What of the mask is tested for each element of most tiles; None: most are seen whole."""
    mask = variant.hooks.get("logits_mask", fold.TRUE)
    decided, left_open = decided_and_open(mask, frozenset(field.name for field in variant.tensors))
    if _are_mostly_partial(variant, decided):
        return roots["logits_mask"]
    return roots.get("open_part", roots["logits_mask"]) if left_open else None


def _are_mostly_partial(variant: TracedVariant, conditions: list[Node]) -> bool:
    """Whether most tiles that rows in the middle of a sample see hide some of their keys.

    Conditions that read tensors, or scalars without a default, are taken to hide nothing. The rows
    are those of one key/value head of eight.
    """
    unknown = {field.name for field in variant.scalars if field.default is None}

    def is_known(condition: Node) -> bool:
        parts = tuple(walk(condition))
        reads = {part.attr for part in parts if part.op == "scalar"}
        return not (any(part.op == "load" for part in parts) or reads & unknown)

    mask = reduce(fold.both, filter(is_known, conditions), fold.TRUE)
    begin = np.arange(0, _SAMPLE, _TILE)
    found = TileAnalysis(replace(variant, hooks={"logits_mask": mask}), {}).classify(
        batch=0, kv_head=1, num_q_heads=32, num_kv_heads=8, q_len=_SAMPLE, kv_len=_SAMPLE,
        q_head=(4, 8), q_pos=(_SAMPLE // 2, _SAMPLE // 2 + _TILE), kv_pos=(begin, begin + _TILE),
    )  # fmt: skip
    return bool(2 * np.count_nonzero(found == PARTIAL) > np.count_nonzero(found != SKIP))
