"""Source of the planner that hosts and devices run: one algorithm, one text per mask.

The algorithm lies in `templates/common/warploom/planner/`; rendered text adds the records, the
parameters and the mask's interval analysis. Tile sizes, heads and formats are parameters, so all
variants without a mask share one planner.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Literal

from warploom.codegen.abi import ParamField, input_fields, ordered, struct_text
from warploom.codegen.lowering.interval_cpp import tile_functions
from warploom.codegen.render import environment
from warploom.codegen.source import KernelSource
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import TracedVariant

ENTRY = "warploom_planner"
MEASURE = "warploom_measure"
OPTIONS = 4  # `kOptions` of scratch.hpp: candidates for the boundaries of a line

# Members of the planner's `Params`, in the order in which the runtime writes them.
INPUTS = ("qo_indptr", "kv_indptr", "last_page_len", "kv_indices")
OUTPUTS = ("header", "cta_indptr", "openings", "segments", "merges", "items", "indices")
BATCH = (
    ("num_requests", "requests"),
    ("max_q_rows", "query rows of all requests that are admitted"),
    ("max_kv_len", "keys of a request that are admitted"),
    ("max_blocks", "pages that are admitted"),
)
SITE = (
    ("storage", "warploom::Storage"),
    ("page_size", "tokens of a page, if storage is paged"),
    ("max_requests", "requests that the scratch memory holds"),
    ("max_tiles", "query tiles that the scratch memory holds"),
    ("num_ctas", "CTAs of the grid"),
    ("lines", "equal lines of items"),
    ("heads_per_line", "key/value heads of a line"),
    ("columns", "CTAs of a line"),
    ("rows", "fused query rows of a tile"),
    ("keys", "keys of a tile"),
    ("group_size", "query heads per key/value head"),
    ("num_q_heads", "query heads"),
    ("num_kv_heads", "key/value heads"),
    ("fixed", "cost of an item without keys"),
    ("per_tile", "cost of a key tile"),
    ("grain", "key tiles of the shortest piece"),
    ("partial", "cost of a partial result"),
    ("few", "items of a column for whose sake fewer CTAs work"),
    ("snap", "a boundary moves up to 1/snap of the mean load to the end of an item"),
)


def planner_fields(variant: TracedVariant) -> tuple[ParamField, ...]:
    """Members of the planner's `Params` for the mask of a variant."""
    fields = [ParamField("const int*", name, "of plan()") for name in INPUTS]
    fields += [ParamField("int*", name, "of the plan") for name in OUTPUTS]
    fields.append(ParamField("int*", "votes", "of the teams of a device, or null"))
    fields += [ParamField("int", name, meaning) for name, meaning in (*BATCH, *SITE)]
    read = _read(variant)
    mask = replace(
        variant,
        scalars=tuple(field for field in variant.scalars if field.name in read),
        tensors=tuple(field for field in variant.tensors if field.name in read),
    )
    return ordered([*fields, *input_fields(mask)])


def planner_source(
    variant: TracedVariant, plan_structs: str, language: Literal["cuda", "cpp"]
) -> KernelSource:
    """Source of the planner.

    Args:
        variant: its mask and that mask's inputs count.
        plan_structs: C text of the plan records (`scheduler.layout.c_structs()`).
        language: for a device or for the host.
    """
    suffix = "cu" if language == "cuda" else "cpp"
    name = _name(variant)
    text = (
        environment()
        .get_template(f"planner.{suffix}.j2")
        .render(
            title=f"// {name}: rendered by warploom from templates/planner.{suffix}.j2",
            plan_structs=plan_structs,
            params_struct=struct_text(planner_fields(variant)),
            variant_struct=_variant(variant),
            reads_kv_head=str("kv_head" in _positions(variant)).lower(),
            entry=ENTRY,
        )
    )
    labels = ("kind", "planner"), ("variant", variant.name)
    return KernelSource(name, text, language, ENTRY, labels)


def scratch_bytes(max_tiles: int, max_requests: int, columns: int) -> int:
    """Size of `Scratch` in templates/common/warploom/planner/scratch.hpp; a test compares them."""
    wide = 8 * (max_tiles + 1) + 16 * min(max_tiles, max_requests)
    boundaries = (OPTIONS * 8 + 8 + 4) * (columns + 1)
    return wide + boundaries + (8 + 3 * 4) * max_tiles + 4 * (max_requests + 1)


def _mask(variant: TracedVariant) -> Node | None:
    return variant.hooks.get("logits_mask")


def _read(variant: TracedVariant) -> frozenset[str]:
    """Inputs that the mask reads."""
    mask = _mask(variant)
    nodes = [] if mask is None else walk(mask)
    return frozenset(str(found.attr) for found in nodes if found.op in ("scalar", "load"))


def _positions(variant: TracedVariant) -> frozenset[str]:
    mask = _mask(variant)
    nodes = [] if mask is None else walk(mask)
    return frozenset(str(found.attr) for found in nodes if found.op == "var")


def _variant(variant: TracedVariant) -> str:
    mask = _mask(variant)
    if mask is None:
        return "struct Variant : IdentityVariant<Params> {};"
    tensors = {field.name: field for field in variant.tensors}
    body = "  static constexpr bool kHasLogitsMask = true;\n" + tile_functions(mask, tensors)
    return f"struct Variant : IdentityVariant<Params> {{\n{body}\n}};"


def _name(variant: TracedVariant) -> str:
    """Readable, and the same for variants that differ elsewhere only."""
    if _mask(variant) is None:
        return "planner_all_visible"
    text = KernelSource("", _variant(variant), "cpp").code
    named = re.sub(r"\W+", "_", variant.name).strip("_")
    return f"planner_{named}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
