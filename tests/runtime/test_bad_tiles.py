"""A tile that no kernel of the CPU can have is refused by name, before a compiler sees it."""

from __future__ import annotations

from typing import Any

import pytest

from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import Composed
from warploom.errors import ArgumentError, UnsupportedSpec, WarploomError
from warploom.runtime.wrappers.declaration import AttentionDeclaration

ODD: Any = 48.0
NAMED: Any = "x"  # after no template


@pytest.mark.parametrize(
    ("tile", "options", "error", "text"),
    [
        (TileConfig(48, 40), {}, UnsupportedSpec, "panels of 64, .* has 40. Use .* multiple of 64"),
        (TileConfig(48, 40), {"kv_format": Composed(16)}, UnsupportedSpec, "panels of 64"),
        (TileConfig(48, 64, decode=TileConfig(12, 32)), {}, UnsupportedSpec, "of decodes has 32"),
        (TileConfig(48, 1 << 25), {}, UnsupportedSpec, "48 x 33554432 is too much.* 65536 rows"),
        (TileConfig(1 << 25, 64), {}, UnsupportedSpec, "33554432 x 64 is too much"),
        (TileConfig(64, 64, template="hopper"), {}, UnsupportedSpec, "hopper .* on GPUs alone"),
        (TileConfig(48, 64, template=NAMED), {}, ArgumentError,
         "tile: there is no template 'x'; expected 'hopper' or 'portable'"),
        (TileConfig(0, 64), {}, ArgumentError, "tile.rows: is 0; expected an int of at least 1"),
        (TileConfig(48, -64), {}, ArgumentError, "tile.keys: is -64; expected an int"),
        (TileConfig(ODD, 64), {}, ArgumentError, "tile.rows: is 48.0; expected an int"),
        (TileConfig(48, 64, decode=TileConfig(12, 0)), {}, ArgumentError, "tile.keys: is 0"),
    ],
)  # fmt: skip
def test_a_tile_that_the_cpu_cannot_have_is_refused(
    tile: TileConfig, options: dict[str, Any], error: type[WarploomError], text: str
) -> None:
    declared = AttentionDeclaration(
        num_q_heads=2, head_dim=64, dtype="float32", tile=tile, **options
    )
    with pytest.raises(error, match=text):
        declared.on("cpu")


@pytest.mark.parametrize("compile_for", ["cpu", "sm_90a"])
def test_a_tile_for_decodes_holds_a_row_of_each_query_head_of_a_group(compile_for: str) -> None:
    def declared(rows: int) -> AttentionDeclaration:
        tile = TileConfig(64, 64, 4, 2, decode=TileConfig(rows, 64, 2, 2))
        return AttentionDeclaration(
            num_q_heads=16, num_kv_heads=2, head_dim=64, dtype="bfloat16", tile=tile
        )

    host = host_target()
    target = host if compile_for == "cpu" else ARCHS[compile_for]
    text = r"tile: has 4 rows for decodes; expected 8 or more: .* of the 8 query heads"
    with pytest.raises(ArgumentError, match=text):
        list(declared(4).jobs(target, [host]))
    assert list(declared(8).jobs(target, [host]))
