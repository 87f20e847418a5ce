"""Tile analysis as C++: the graphs of `dsl.masks.intervals`, lowered in 64-bit integers."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.lowering.lower import POSITION_TEXT, Block
from warploom.dsl.masks.intervals import FIXED, RANGED, tile_graphs
from warploom.dsl.types.ir import Node, walk
from warploom.dsl.types.spec import TensorField

_POSITIONS: Mapping[str, str] = {
    **{name: POSITION_TEXT[name] for name in FIXED},
    **{f"{name}_first": f"{name}.begin" for name in RANGED},
    **{f"{name}_last": f"{name}.end - 1" for name in RANGED},
}
_BOX = "const Params& p, const TileInfo& tile, Range q_pos,\n      Range kv_pos, Range q_head"


def tile_functions(mask: Node, tensors: Mapping[str, TensorField]) -> str:
    """C++ text of `classify` and `kv_bounds` for a mask."""
    graphs = tile_graphs(mask, frozenset(tensors))
    tile_class = Block(tensors, positions=_POSITIONS, wide=True)
    see, hide = tile_class.compute([graphs.may_see, graphs.may_hide])
    tile_class.finish(f"return tile_class({see}, {hide});")
    bounds = Block(tensors, positions=_POSITIONS, wide=True)
    begin, end = bounds.compute([graphs.kv_begin, graphs.kv_end])
    bounds.finish(f"return {{int({begin}), int({end})}};")
    return "\n".join(
        (
            f"  WL_FN static TileClass classify({_BOX}) {{",
            *tile_class.statements,
            "  }",
            "  WL_FN static Range kv_bounds(const Params& p, const TileInfo& tile, Range q_pos,",
            "      Range q_head) {",
            *bounds.statements,
            "  }",
        )
    )


def classes_read(mask: Node, tensors: frozenset[str]) -> bool:
    """Whether classes of tiles are worked out from values of tensors."""
    graphs = tile_graphs(mask, tensors)
    roots = graphs.may_see, graphs.may_hide
    return any(found.op == "load" for root in roots for found in walk(root))


def decided_function(decided_may_hide: Node, tensors: Mapping[str, TensorField]) -> str:
    """C++ text of `decided_may_hide` of a mask of two parts, from its graph."""
    block = Block(tensors, positions=_POSITIONS, wide=True)
    (hides,) = block.compute([decided_may_hide])
    block.finish(f"return {hides};")
    return "\n".join((f"  WL_FN static bool decided_may_hide({_BOX}) {{", *block.statements, "  }"))
