"""Tiles of one fused query row (single.cuh): decoding without groups, and without tensor cores."""

from __future__ import annotations

from warploom.codegen.functors import scale_factors
from warploom.codegen.source import TileConfig
from warploom.codegen.staged_item import round_up, staged_item_bytes
from warploom.dsl.ir import walk
from warploom.dsl.spec import AttentionSpec
from warploom.errors import UnsupportedSpec

SINGLE_ROW = 1
MORE_REGISTERS_SINCE = (12, 0)  # compute capability from which a thread takes more

_FEWEST_TOKENS = 8  # of a block; pages of 1 were slower and pages of 16 faster than with 16 rows
_WARPS = 4  # small CTAs, two to four on an SM: one ends an item, the others read


def single_tile(spec: AttentionSpec) -> TileConfig:
    """The tile for a specification that `single_row_obstacle` has nothing against.

    A warp's tile of keys is in its registers: 16 keys if more than 8 lanes share a row, else 32, so
    that each lane has eight vectors of keys and of values on their way, or sixteen of wide heads.
    """
    lanes = max(spec.head_dim_qk, spec.head_dim_v) * spec.stored_dtype.bytes // 16
    return TileConfig(SINGLE_ROW, _WARPS * (16 if lanes > 8 else 32), _WARPS, 1)


def single_row_obstacle(spec: AttentionSpec) -> str | None:
    """Why such tiles cannot compute this, or None: keys and values never lie in shared memory."""
    seats = spec.variant.seats
    if spec.kv_format.composed:
        return "rows of several requests share a tile of composed plans"
    if "key_transform" in seats:
        return "a key transform needs staged keys"
    if "value_transform" in seats and not scale_factors(seats["value_transform"]):
        return "a value transform that is no scale needs staged values"
    return None


def single_row_drawback(spec: AttentionSpec) -> str | None:
    """Why such tiles are slower here, though they can compute it; or None.

    On an H200 pages of 1 cost them 5 to 10 % of bandwidth (16 x 1,024 keys: 3,867 against 4,216
    GB/s), and tiles of 16 rows, whose addresses are looked up ahead, nearly nothing.
    """
    if _has_small_blocks(spec):
        return "blocks of few tokens are looked up ahead there"
    return None


def check_single_row(spec: AttentionSpec) -> None:
    """Refuse what such tiles cannot compute.

    Raises:
        UnsupportedSpec: with the reason.
    """
    obstacle = single_row_obstacle(spec)
    if obstacle:
        raise UnsupportedSpec(
            what="a tile of one row", reason=obstacle, remedy="Use a tile of 16 rows."
        )


def single_registers(spec: AttentionSpec, capability: tuple[int, int]) -> int:
    """Registers of a thread, at most: for vectors on their way, and for what seats keep.

    A sweep found spills in 128 where logits are transformed, the mask reads inputs, columns are
    listed or blocks have few tokens, each of which has an address of its own. 8-bit vectors make
    twice the numbers. For compute capability 12.0 the compiler needs two more with heads of 64 or
    96 over pages of 16, too.

    Args:
        spec: what to compute.
        capability: compute capability of the device.
    """
    if max(spec.head_dim_qk, spec.head_dim_v) > 128:
        return 255
    listed = spec.kv_format.column_positions or _has_small_blocks(spec)
    tight = mask_reads_inputs(spec) or "logits_transform" in spec.variant.seats
    is_late = capability >= MORE_REGISTERS_SINCE
    return 168 if tight or spec.is_narrow or listed or is_late else 128


def _has_small_blocks(spec: AttentionSpec) -> bool:
    return 0 < spec.kv_format.block_kv < _FEWEST_TOKENS


def mask_reads_inputs(spec: AttentionSpec) -> bool:
    """True if the mask reads fields, and not positions alone."""
    mask = spec.variant.seats.get("logits_mask")
    return mask is not None and any(found.op in ("load", "scalar") for found in walk(mask))


def single_shared_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Size of `Arena<K, 1>` in single.cuh; a test compares the two."""
    dim_qk, dim_v = round_up(spec.head_dim_qk, 32), round_up(spec.head_dim_v, 32)
    slabs = 2 * dim_qk + tile.warps * (4 * dim_v + 8)
    return round_up(slabs, 16) + 2 * staged_item_bytes(spec.kv_format, tile)
