"""The template of the CPU back end; the spec and the rows of requests determine tile sizes."""

from __future__ import annotations

from warploom.codegen.attention.template import Template
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec

# Multiples of the micro-kernel's 6 rows (AMX takes 16 or 32 at a time). In a larger tile more rows
# share the packing of a tile of keys; smaller tiles have smaller partial results, and there are
# more of them to distribute. So the largest needs requests that fill several (`_MANY_ROWS`).
_ROWS = (12, 48, 192, 384)
_MANY_ROWS = 4 * _ROWS[-1]
_KEYS = (512, 256, 128, 64)
_PACKED_BYTES = (
    256 * 1024
)  # packed keys and values, beside queries and outputs in a second-level cache
# Keys of a packed panel (`kPanel`) with the widest vectors; panels for narrower vectors divide it.
# All processors have the same rule, since one declaration is built for several.
_PANEL = 64
_LARGEST = 1 << 16  # rows or keys; a thread stores a packed tile, and counts its elements in ints


class Cpu(Template):
    """C++ for the host compiler, with vectors and threads."""

    name = "cpu"
    language = "cpp"
    takes_roles = True
    remedy = (
        f"Use tiles of keys that are a multiple of {_PANEL}, and of no more than {_LARGEST} rows "
        "and keys, without `template`."
    )

    def obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        for role, own in (tile.of_roles or {"": tile}).items():
            if own.template != TileConfig.template:
                return f"the {own.template} template runs on GPUs alone"
            if own.keys % _PANEL != 0:
                of = f"that of {role}s" if role else "it"
                return f"keys are packed in panels of {_PANEL}, and {of} has {own.keys}"
            if max(own.rows, own.keys) > _LARGEST:
                return f"each thread packs a tile, and {own.rows} x {own.keys} is too much of it"
        return None

    def called(self, tile: TileConfig) -> str:
        """The name of a tile without warps, since one thread computes it."""
        return f"a tile of {tile.rows} rows and {tile.keys} keys"

    def choose(self, spec: AttentionSpec, mean_fused_rows: float) -> TileChoice:
        """Choose rows and keys per tile.

        Args:
            spec: what to compute.
            mean_fused_rows: query rows x query heads per key/value head, mean over the requests.
        """
        fitting = (rows for rows in _ROWS[:-2] if mean_fused_rows <= rows)
        rows = next(fitting, _ROWS[-1] if mean_fused_rows >= _MANY_ROWS else _ROWS[-2])
        packed_bytes = 2 if spec.stored_dtype.name == "bfloat16" else 4  # others become float32
        key_bytes = (spec.head_dim_qk + spec.head_dim_v) * packed_bytes
        keys = next((keys for keys in _KEYS if keys * key_bytes <= _PACKED_BYTES), _KEYS[-1])
        reason = (
            f"{mean_fused_rows:.4g} fused rows per request: tiles of {rows}; packed keys and "
            f"values of {keys * key_bytes // 1024} KiB fit the second-level cache"
        )
        return TileChoice(TileConfig(rows, keys, warps=1, stages=1), reason)
