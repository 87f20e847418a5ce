"""The Hopper template: sizes that fit its registers and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import MappingProxyType
from typing import Literal

from warploom.codegen.attention.hopper_registers import (
    LAUNCHED,
    WARPGROUP_ROWS,
    Registers,
    split,
)
from warploom.codegen.attention.portable import stages_obstacle
from warploom.codegen.attention.rates import ComposedRates, Rates, Recorded, TileSizes
from warploom.codegen.attention.shared_memory import (
    TILE_ALIGN,
    Region,
    SharedMemory,
    items_region,
    padded,
    padded_dims,
)
from warploom.codegen.attention.streamed import StreamedInBoxes
from warploom.codegen.attention.template import Work
from warploom.codegen.attention.tensor_boxes import (
    Box,
    box_of,
    holds_small_blocks,
    suits_blocks,
    swizzled_lanes,
)
from warploom.codegen.attention.two_roles import TwoRoles
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.logits_hooks import column_state_bytes
from warploom.codegen.lowering.lower import reachable
from warploom.codegen.lowering.split import Level, levels
from warploom.codegen.render import Config
from warploom.codegen.sizes import round_up
from warploom.codegen.source import TileConfig
from warploom.dsl.graphs.lanes import reads_other_lanes, reduces_lanes
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import AttentionSpec

_BARRIER_BYTES = 8  # Barrier
_VISIT_BYTES = 4  # Visit
_TRANSFORMS = ("query_transform", "key_transform", "value_transform")
_ON_LOGITS = ("logits_transform", "logits_mask")
# Most keys of a tile, by consumer groups. One group: a thread copies each key. Two: a tensor copy
# has at most 256 keys. Three: a thread has no registers for the products of more keys.
_MOST_KEYS = 128, 256, 224
_WIDENED_LANES = (112, 128)  # padded to 128 lanes, whose 8-bit row fills one of two 16-bit panels
_LOOKED_UP = 128  # keys that four warps copy; each lane looks up one key's address

_ON_H200 = Recorded(
    small_heads={
        "hopper 128": Rates(flops=3.35, launch=9.17, item=3.17, merge=4.31),
        "hopper 192": Rates(flops=3.44, launch=10.9, item=1.87, merge=2.77),
    },
    wide_heads={"hopper 128": Rates(flops=5.62, launch=9.2, item=4.2, merge=5.8)},
    composed={TileSizes(128, 128, 8): ComposedRates(launch=16.8, read=0, walk=17.3, item=2.03)},
)


class Hopper(TwoRoles):
    """A producer group copies, and one to three consumer groups of 64 rows compute (decision 0011).

    Attributes:
        transforms: which warps transform staged tiles. "auto" depends on the variant. Measurements
            use the others (decision 0042): "group" is a group of four separate warps (0018),
            without sines from other rows (0019); "consumers" are the warps that compute.
    """

    name = "hopper"
    prefill_ps, narrow_ps = 1_800_000, 2_800_000
    recorded = MappingProxyType({"sm_90a": _ON_H200})
    remedy = (
        "Use a tile such as TileConfig(128, 128, 8, template='hopper') where the heads allow one, "
        "or a portable one such as TileConfig(128, 64, 8)."
    )
    decodes = StreamedInBoxes()

    def __init__(self, transforms: Literal["auto", "group", "consumers"] = "auto") -> None:
        """A template whose kernels transform staged tiles by these warps."""
        self.transforms = transforms

    def compiles_for(self, arch: Arch) -> bool:
        return arch.capability == (9, 0)

    def obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        if why := _narrow_obstacle(spec) or _size_obstacle(tile):
            return why
        if tile.keys > _LOOKED_UP and self._box(spec, tile) is None:
            return f"a warp looks up {_LOOKED_UP} keys of such blocks, and it has {tile.keys}"
        if self.transforms == "group" and not _has_transformer(spec):
            return "no group of its own could transform what these heads stage"
        if self.transforms == "group" and tile.decode is not None:
            return "a group of its own leaves decodes too few registers"
        if why := self.role_obstacle(spec, tile):
            return why
        crowd = _three_groups_obstacle(spec) if tile.rows > 2 * WARPGROUP_ROWS else None
        return crowd and f"a thread of three groups has 144 registers, and {crowd}"

    def tensor_maps(self, tile: TileConfig) -> int:
        """Two maps, of keys and values; with two roles, decodes have two more."""
        return 2 if tile.decode is None else 4

    def threads(self, spec: AttentionSpec, tile: TileConfig) -> int:
        """Threads of a CTA: consumers, four producer warps, and perhaps four that transform."""
        return 32 * (tile.warps + 4 + 4 * self._has_group(spec, tile))

    def cta_threads(self, spec: AttentionSpec, tile: TileConfig) -> int:
        return self.threads(spec, tile)

    def launch(self, spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
        self.check(spec, tile)
        threads, shared = self.threads(spec, tile), self.shared_bytes(spec, tile)
        exchanges = self.registers(spec, tile).consumer > 0
        registers = LAUNCHED[threads // 128] if exchanges else 0
        return LaunchShape(threads, shared, 1, overlaps=True, registers=registers)

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        return f"{self.threads(spec, tile)}, 1"

    def constants(self, spec: AttentionSpec, tile: TileConfig) -> Config:
        box = self._box(spec, tile)
        return {
            "query_stages": tile.query_stages,
            "bulk": box is not None,
            "box_tokens": box.tokens if box else 0,
            "box_row_bytes": box.row_bytes if box else 0,
            "transformer": self._has_group(spec, tile),
            **{f"{role}_registers": n for role, n in asdict(self.registers(spec, tile)).items()},
        }

    def registers(self, spec: AttentionSpec, tile: TileConfig) -> Registers:
        """Registers of a thread in each group."""
        groups, has_columns = tile.rows // WARPGROUP_ROWS, self.column_bytes(spec) > 0
        return split(groups, self._hardest(spec, tile), has_columns)

    def _hardest(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """The key of `SHARES` for the copies or transforms that need the most registers."""
        bulk, (dim_qk, dim_v) = self._box(spec, tile) is not None, padded_dims(spec)
        if self._has_group(spec, tile):
            if spec.head_dim_v > 96:
                return "transforms"
            if bulk and spec.head_dim_qk == dim_qk:
                return "transforms small heads"
            return "transforms gathered or padded rows of small heads"
        if bulk and spec.head_dim_v > 128:
            return "copies wide values in bulk"
        panels = dim_v // swizzled_lanes((dim_qk, dim_v))
        return "copies more than four panels" if panels > 4 else "copies"

    def has_sine_recurrence(self, spec: AttentionSpec, tile: TileConfig) -> bool:
        """True if rows have evenly spaced positions and separate warps transform them."""
        listed = spec.kv_format.composed or spec.kv_format.column_positions
        if listed or spec.is_narrow:
            return False
        return self.transforms == "auto" and self._has_group(spec, tile)

    def _has_group(self, spec: AttentionSpec, tile: TileConfig) -> bool:
        """Whether four separate warps transform staged tiles; never beside a role of decodes."""
        wanted = self.transforms != "consumers" and tile.decode is None
        return wanted and _has_transformer(spec)

    def keeps_bytes(self, spec: AttentionSpec) -> bool:
        """True for wide heads, whose staged keys leave no room for more than bytes.

        A byte costs one instruction more per column of a tile than a number.
        """
        return max(spec.head_dim_qk, spec.head_dim_v) > 192

    def box(self, kv_format: KVFormat, tile: TileConfig, dims: tuple[int, int]) -> Box | None:
        return box_of(kv_format, tile, padded(*dims))

    def _box(self, spec: AttentionSpec, tile: TileConfig) -> Box | None:
        return self.box(spec.kv_format, tile, (spec.head_dim_qk, spec.head_dim_v))

    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterator[TileConfig]:
        """Tiles of groups of 64 rows, with as many keys as fit.

        Queries of the next item are copied early if there is room for two query tiles. Keys come in
        whole blocks if a tile has such a number of keys, and in parts of blocks otherwise.
        """
        if work.rows <= WARPGROUP_ROWS or _narrow_obstacle(spec):
            return
        # The accumulators for 128 keys and 128 lanes leave just enough of 192 registers (224 if
        # heads are wide).
        widest = max(spec.head_dim_qk, spec.head_dim_v)
        most = 64 if widest > 192 else 96 if self._is_crowded(spec) else 128
        block, fitting = spec.kv_format.block_kv, [keys for keys in (128, 96, 64) if keys <= most]
        suiting = [keys for keys in fitting if suits_blocks(keys, block)] or fitting
        if not _three_groups_obstacle(spec) and 96 in suiting:
            yield TileConfig(192, 96, 12, 3, "hopper", 2)
        for keys in suiting:
            for query_stages in (2, 1):
                yield TileConfig(128, keys, 8, 2, "hopper", query_stages)

    def tiles(self, spec: AttentionSpec, arch: Arch, work: Work) -> list[TileConfig]:
        """The best tile for each number of groups, the best of all first."""
        best: dict[int, TileConfig] = {}
        for tile in super().tiles(spec, arch, work):
            best.setdefault(tile.rows, tile)
        return list(best.values())

    def passed_over(self, spec: AttentionSpec, arch: Arch, work: Work) -> str | None:
        suits = self.compiles_for(arch) and work.rows > WARPGROUP_ROWS
        return _narrow_obstacle(spec) if suits else None

    def weighed(self, spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
        return self.tiles(spec, arch, Work(rows=WARPGROUP_ROWS + 1))[::-1]

    def kind(self, tile: TileConfig) -> str:
        return f"hopper {tile.rows}"

    def reason(self, spec: AttentionSpec, tile: TileConfig, arch: Arch, work: Work) -> str:
        return (
            f"{work}: {tile.rows // WARPGROUP_ROWS} groups of {WARPGROUP_ROWS} rows "
            f"take turns on Hopper's tensor cores; {tile.keys} keys in {tile.stages} stages and "
            f"{tile.query_stages} tiles of queries are what fits the shared memory"
        )

    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """With two query tiles the next item is opened, and its queries are copied, early."""
        dim_qk, dim_v = padded_dims(spec)
        row_threads = swizzled_lanes((dim_qk, dim_v)) // 8
        slots = (tile.stages + 1) * tile.keys  # read after the tile's keys are released
        items = 1 if tile.query_stages == 1 else tile.query_stages + 1
        barriers = _BARRIER_BYTES * (2 * items + 3 * tile.query_stages + 6 * tile.stages)
        return SharedMemory(
            Region("queries", tile.query_stages * tile.rows * 2 * dim_qk, TILE_ALIGN),
            Region("keys", tile.stages * tile.keys * 2 * dim_qk, TILE_ALIGN),
            Region("values", tile.stages * tile.keys * 2 * dim_v, TILE_ALIGN),
            Region("slab", 4 * (32 * tile.warps // row_threads) * (dim_v + 8)),
            Region("positions", 4 * slots if spec.kv_format.column_positions else 0),
            Region("columns", slots * self.column_bytes(spec)),
            items_region(spec, tile, items),
            Region("barriers", barriers + _VISIT_BYTES * round_up(tile.stages, 2)),
        )

    def column_bytes(self, spec: AttentionSpec) -> int:
        """Bytes that hooks on logits keep per key for all rows; composed rows see other values."""
        if spec.kv_format.composed:
            return 0
        return column_state_bytes(
            spec.variant, self.keeps_bytes(spec), self.shifts_rows(spec), joins_keys=True
        )

    def _is_crowded(self, spec: AttentionSpec) -> bool:
        """Whether consumer groups load a number per element and transform gathered keys.

        With 128 keys of 128 lanes, norms with RoPE then spilled 48 bytes.
        """
        gathers = holds_small_blocks(spec.kv_format.block_kv)
        if "key_transform" not in spec.variant.hooks or _has_transformer(spec) or not gathers:
            return False
        return spec.is_narrow or Level.ELEMENT in _loads_on_logits(spec)


def _narrow_obstacle(spec: AttentionSpec) -> str | None:
    """Why 8-bit keys and values cannot be widened in place (decision 0058), or None."""
    if not spec.is_narrow or {spec.head_dim_qk, spec.head_dim_v} <= set(_WIDENED_LANES):
        return None
    few, most = _WIDENED_LANES
    return f"it takes 8-bit keys and values of {few} and {most} lanes alone"


def _size_obstacle(tile: TileConfig) -> str | None:
    """Why no kernel can have a tile of this size, or None."""
    groups, rest = divmod(tile.rows, WARPGROUP_ROWS)
    if rest or not 1 <= groups <= 3:
        return f"one to three groups have {WARPGROUP_ROWS} rows each, and it has {tile.rows}"
    if tile.warps != (wanted := 4 * groups):
        sizes = f"{tile.rows} rows are {groups} times {WARPGROUP_ROWS}"
        return f"{sizes}, of {wanted} warps in all, and it has {tile.warps}"
    if tile.keys % 32:
        return f"keys are a multiple of 32, and it has {tile.keys}"
    most = _MOST_KEYS[groups - 1]
    if tile.keys > most:
        return f"{tile.warps} warps have {most} keys at most, and it has {tile.keys}"
    if tile.query_stages < 1:
        return "queries lie in one place at least, and it has none"
    return stages_obstacle(tile)


def _has_transformer(spec: AttentionSpec) -> bool:
    """Whether four separate warps transform or widen staged tiles; else consumers do.

    They would have too few registers beside the accumulators of wide heads. They would also have
    too few for more than 64 lanes if a hook both reduces over lanes and reads lanes other than its
    own (norms with RoPE).
    """
    roots = [spec.variant.hooks[hook] for hook in _TRANSFORMS if hook in spec.variant.hooks]
    if not roots:
        return spec.is_narrow and _is_easy_on_logits(spec)
    most = 64 if reduces_lanes(*roots) and reads_other_lanes(*roots) else 128
    return max(spec.head_dim_qk, spec.head_dim_v) <= most


def _is_easy_on_logits(spec: AttentionSpec) -> bool:
    """Whether consumers beside a widening group have enough registers for hooks on logits.

    They spilled 16 to 80 bytes where hooks keep values read per key or load a number per element,
    where rows belong to several requests, and without a softmax. If consumers widen a tile ahead
    themselves, they do not spill.
    """
    reads = _loads_on_logits(spec) & {Level.COLUMN, Level.ELEMENT}
    return spec.variant.softmax and not reads and not spec.kv_format.composed


def _loads_on_logits(spec: AttentionSpec) -> set[Level]:
    """Levels at which hooks on logits load from fields: per key, per element, and so on."""
    hooks = spec.variant.hooks
    parts = list(reachable([hooks[name] for name in _ON_LOGITS if name in hooks]))
    known = levels(parts)
    return {known[part] for part in parts if part.op == "load"}


def _three_groups_obstacle(spec: AttentionSpec) -> str | None:
    """Why three groups have too few registers, or None.

    Without such a reason they pay: small heads have few products for each exponential, and one more
    group to compute the exponentials gained 7 to 11 % on an H200.
    """
    hooks = spec.variant.hooks
    on_logits = [hooks[hook] for hook in _ON_LOGITS if hook in hooks]
    if max(spec.head_dim_qk, spec.head_dim_v) > 64:
        return "outputs of more than 64 lanes take most of them"
    if spec.kv_format.composed or spec.kv_format.column_positions:
        return "rows and keys have positions of their own in this format"
    if transforms := [hook for hook in _TRANSFORMS if hook in hooks]:
        return f"{transforms[0]} takes a share for warps of its own or for what it keeps"
    if any(found.op in ("load", "scalar") for found in walk(*on_logits)):
        return "hooks on logits keep there what they read of fields"
    return None
