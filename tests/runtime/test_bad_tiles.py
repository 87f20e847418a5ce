"""A tile that no kernel of the CPU can have is refused by name, before a compiler sees it."""

from __future__ import annotations

from typing import Any

import pytest

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
