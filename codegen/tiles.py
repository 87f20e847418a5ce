"""Which tile a CUDA kernel is compiled for, and what its launch needs: pure functions, no device.

One fused row a request has a tile of its own (`tiles_single.py`). Of the others, where a sweep was
recorded, the model of `tile_cost.py` chooses. Elsewhere sizes follow
FlashAttention-2 and FlashInfer (section 3.2.2): the row tile is the smallest of 16, 64 and 128 that
holds the mean number of fused rows of a request, and the rest is what fits the architecture and,
for few rows, how many items there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from warploom.codegen.arch import REGISTERS_PER_SM, Arch
from warploom.codegen.functors import scale_factors
from warploom.codegen.source import TileConfig
from warploom.codegen.staged_item import round_up, staged_item_bytes
from warploom.codegen.tile_cost import (
    MANY_ITEMS,
    TYPICAL_KEYS,
    Work,
    is_known,
    predicted_us,
    weighed_tiles,
)
from warploom.codegen.tiles_hopper import (
    GROUP_ROWS,
    hopper_launch,
    hopper_threads,
    hopper_tiles,
)
from warploom.codegen.tiles_single import (
    MORE_REGISTERS_SINCE,
    SINGLE_ROW,
    check_single_row,
    mask_reads_inputs,
    single_registers,
    single_row_drawback,
    single_row_obstacle,
    single_shared_bytes,
    single_tile,
)
from warploom.dsl.spec import AttentionSpec
from warploom.errors import UnsupportedSpec

_WARP = 32
STREAMED_ROWS = 16  # of tiles whose warps stream keys (stream.cuh)
_MOST_REGISTERS = 255  # of a thread
_RESERVED_BYTES = 1024  # of shared memory, by the system for each CTA


@dataclass(frozen=True)
class LaunchShape:
    """What a launch of a CUDA kernel needs.

    Attributes:
        threads: threads of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
        ctas_per_sm: CTAs that an SM holds, by shared memory and the most registers of such tiles.
        overlaps: whether it may begin while the kernel before it ends (decision 0022).
    """

    threads: int
    shared_bytes: int
    ctas_per_sm: int
    overlaps: bool = False


def cuda_launch(spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
    """Launch shape of the kernel that a tile names."""
    if tile.template == "hopper":
        hopper = hopper_launch(spec, tile)
        return LaunchShape(hopper.threads, hopper.shared_bytes, 1, overlaps=True)
    threads = portable_threads(tile)
    shared = _shared_bytes(spec, tile)
    ctas = min(
        arch.shared_per_sm // (shared + _RESERVED_BYTES),
        arch.registers_per_sm // (_registers(spec, tile, arch) * threads),
        arch.threads_per_sm // threads,
    )
    return LaunchShape(threads, shared, ctas, arch.overlaps and tile.rows > 1)


def _registers(spec: AttentionSpec, tile: TileConfig, arch: Arch) -> int:
    """Registers of a thread, at most: all that there are, but for few rows of narrow heads.

    Joining holds several partial results of a row.
    """
    if tile.rows == SINGLE_ROW:
        return single_registers(spec, arch.capability)
    narrow = max(spec.head_dim_qk, spec.head_dim_v) <= 128
    few = 200 if spec.kv_format.composed else 168
    return few if tile.rows == STREAMED_ROWS and narrow else _MOST_REGISTERS


def portable_threads(tile: TileConfig) -> int:
    """Threads of a CTA: those that compute, and where warps stream keys, one warp more."""
    return (tile.warps + (tile.rows == STREAMED_ROWS)) * _WARP


def launch_bounds(spec: AttentionSpec, tile: TileConfig) -> str:
    """Arguments of `__launch_bounds__`: threads, and the CTAs that an SM must hold.

    Of tall tiles as many as leave a thread all registers: not told, the compiler may save some for
    more CTAs, and spill. Where warps stream keys, shared memory limits the CTAs, and one alone is
    asked for. Tiles of one row live in registers.

    Raises:
        UnsupportedSpec: a tile of one row, or of three groups on Hopper, cannot compute this.
    """
    if tile.template == "hopper":
        return f"{hopper_threads(spec, tile)}, 1"
    threads = portable_threads(tile)
    if tile.rows == SINGLE_ROW:
        check_single_row(spec)
        return f"{threads}, {_single_ctas(spec, threads)}"
    if tile.rows == STREAMED_ROWS:
        return f"{threads}, 1"
    return f"{threads}, {REGISTERS_PER_SM // (_MOST_REGISTERS * threads)}"


def _single_ctas(spec: AttentionSpec, threads: int) -> str:
    """CTAs of one row that an SM must hold: an expression, since one text serves all devices."""
    early, late = (
        REGISTERS_PER_SM // (single_registers(spec, capability) * threads)
        for capability in ((0, 0), MORE_REGISTERS_SINCE)
    )
    since = 100 * MORE_REGISTERS_SINCE[0] + 10 * MORE_REGISTERS_SINCE[1]
    return str(late) if late == early else f"__CUDA_ARCH__ < {since} ? {early} : {late}"


def choose_tile(
    spec: AttentionSpec,
    arch: Arch,
    mean_fused_rows: float,
    items_per_sm: float | None = None,
    mean_keys: float | None = None,
) -> TileConfig:
    """The tile for a batch: of one row, or the cheapest by a model of costs, or by rows.

    Args:
        spec: what to compute.
        arch: where.
        mean_fused_rows: query rows x query heads per key/value head, mean over the requests.
        items_per_sm: requests x key/value heads for each SM; None if unknown, taken as many.
        mean_keys: keys of a request; None if unknown. Only the model asks for them.

    Returns:
        A tile that fits the architecture, with the reason in words.

    Raises:
        UnsupportedSpec: no tile fits.
    """
    is_single = mean_fused_rows <= SINGLE_ROW
    obstacle = (single_row_obstacle(spec) or single_row_drawback(spec)) if is_single else None
    if is_single and not obstacle:
        tile = single_tile(spec)
        shape = cuda_launch(spec, tile, arch)
        return replace(tile, reason=_reason(tile, shape, arch, mean_fused_rows))
    tile = _tall_tile(spec, arch, mean_fused_rows, items_per_sm, mean_keys)
    reason = f"{tile.reason}; not one row, since {obstacle}" if obstacle else tile.reason
    return replace(tile, reason=reason)


def _tall_tile(
    spec: AttentionSpec,
    arch: Arch,
    mean_fused_rows: float,
    items_per_sm: float | None,
    mean_keys: float | None,
) -> TileConfig:
    """The cheapest tile of 16 rows or more by a model, or where none was fitted, by rows."""
    work = Work(
        mean_fused_rows,
        MANY_ITEMS if items_per_sm is None else items_per_sm,
        TYPICAL_KEYS if mean_keys is None else mean_keys,
    )
    pool = tiles_weighed(spec, arch)
    if pool:
        return _cheapest(spec, arch, pool, work)
    if mean_fused_rows > 64:
        for tile in hopper_by_groups(spec, arch)[:1]:
            return replace(tile, reason=_hopper_reason(tile, mean_fused_rows))
    few = items_per_sm is not None and items_per_sm <= 1
    fitting = [
        (tile, shape)
        for tile in _candidates(spec, arch, mean_fused_rows, few)
        if (shape := cuda_launch(spec, tile, arch)).shared_bytes <= arch.shared_per_cta
    ]
    if fitting and fitting[0][0].rows == STREAMED_ROWS:
        tile, shape = fitting[0]
        items = "no more" if few else "more"
        return replace(
            tile,
            reason=f"{_reason(tile, shape, arch, mean_fused_rows)}, for {items} pairs of a "
            f"request and a head than SMs",
        )
    if fitting:
        tile, shape = max(fitting, key=lambda found: _merit(*found))  # the first of equals
        reason = _reason(tile, shape, arch, mean_fused_rows)
        if spec.is_narrow and "hopper" in arch.templates and mean_fused_rows > 64:
            reason += "; the Hopper template takes no 8-bit keys"
        return replace(tile, reason=reason)
    raise UnsupportedSpec(
        what=f"head_dim {spec.head_dim_qk}/{spec.head_dim_v} on {arch.name}",
        reason="no tile fits its shared memory",
        remedy="Use a smaller head_dim.",
    )


def tiles_weighed(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """Tiles that a model of costs chooses from, the highest last; none where there is no model."""
    sizes = weighed_tiles(spec, arch)
    if not sizes:
        return []
    tiles = [TileConfig(*size, 2) for size in sizes]
    return [*_fitting(spec, arch, tiles), *reversed(hopper_by_groups(spec, arch))]


def every_tile(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """All tiles that a batch of some kind may get and that fit, for measurements of the choice."""
    cases = ((rows, few) for rows in (1, 16, 64, 128) for few in (True, False))
    tiles = [tile for rows, few in cases for tile in _candidates(spec, arch, rows, few)]
    fitting = _fitting(spec, arch, [*tiles_weighed(spec, arch), *tiles])
    return list(dict.fromkeys([*fitting, *hopper_by_groups(spec, arch)]))


def _fitting(spec: AttentionSpec, arch: Arch, tiles: Iterable[TileConfig]) -> list[TileConfig]:
    return [
        tile for tile in tiles if cuda_launch(spec, tile, arch).shared_bytes <= arch.shared_per_cta
    ]


def hopper_by_groups(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """The best tile of the Hopper template with each number of groups, the best of all first."""
    if "hopper" not in arch.templates or spec.is_narrow:
        return []
    best: dict[int, TileConfig] = {}
    for tile in _fitting(spec, arch, hopper_tiles(spec)):
        best.setdefault(tile.rows, tile)
    return list(best.values())


def _cheapest(
    spec: AttentionSpec, arch: Arch, pool: Sequence[TileConfig], work: Work
) -> TileConfig:
    """The tile that the model predicts to be fastest."""
    known = [tile for tile in pool if is_known(tile, work)] or pool[-1:]
    costs = {tile: predicted_us(spec, arch, tile, work) for tile in known}
    ranked = sorted(known, key=lambda tile: costs[tile])  # the first of equals
    tile = ranked[0]
    shape = cuda_launch(spec, tile, arch)
    if tile.template == "hopper":
        reason = _hopper_reason(tile, work.rows)
    else:
        reason = _reason(tile, shape, arch, work.rows)
    given = f"{work.items:.3g} pairs of a request and a head for each SM and {work.keys:.4g} keys"
    return replace(
        tile,
        reason=f"{reason}; the cheapest of {len(known)} by the model of costs, for {given}",
        costs=tuple((found.label, costs[found]) for found in ranked),
    )


def _candidates(
    spec: AttentionSpec, arch: Arch, mean_fused_rows: float, few: bool
) -> Iterator[TileConfig]:
    """Tiles to try, in the order of speed on an H200.

    One tile of keys is copied while another is used: two stages are the least. 32 rows per warp
    halve the reads of keys from shared memory, but the output of wide heads would not fit the
    registers then.
    """
    widest = max(spec.head_dim_qk, spec.head_dim_v)
    if mean_fused_rows <= 16:
        # All warps share the rows and stream keys. Two CTAs on an SM hide that each ends its items
        # alone; where no CTA has two items, one CTA leaves fewer partial results to merge.
        alone, paired = TileConfig(16, 128, 4, 2), TileConfig(16, 64, 2, 2)
        if spec.is_narrow:  # half the bytes, the same instructions: more warps
            yield TileConfig(16, 256, 8, 2)
        yield from (alone, paired) if few or spec.is_narrow else (paired, alone)
        yield TileConfig(16, 32, 2, 2)
        yield TileConfig(16, 16, 1, 2)
        return
    if mean_fused_rows > 64 and widest <= 128 and not spec.is_narrow:
        tight = _needs_registers(spec, arch)
        if widest <= 64 and not tight:
            yield TileConfig(128, 128, 4, 2)
        if widest <= 64 or not tight:
            yield TileConfig(128, 64, 4, 2)
        yield TileConfig(128, 32, 4, 2)
    if mean_fused_rows > 64:
        yield from (TileConfig(128, keys, 8, 2) for keys in (64, 32))
    if widest <= 128:
        yield TileConfig(64, 32, 2, 2)
    yield from (TileConfig(64, keys, 4, 2) for keys in (32, 64))


def _needs_registers(spec: AttentionSpec, arch: Arch) -> bool:
    """True if seats on logits leave the largest tiles too few registers.

    A sweep found spills where logits are transformed or the mask reads inputs, and on newer
    architectures with any mask.
    """
    seats = spec.variant.seats
    if "logits_mask" not in seats or "logits_transform" in seats:
        return "logits_transform" in seats
    return mask_reads_inputs(spec) or arch.capability >= (10, 0)


def _merit(tile: TileConfig, shape: LaunchShape) -> tuple[int, int]:
    """What makes a tile good, of an SM with all its CTAs: first one number, then the warps.

    Many rows wait for the tensor cores and shared memory, so that rows which use the same keys
    count.
    """
    return shape.ctas_per_sm * tile.rows, shape.ctas_per_sm * tile.warps


def _reason(tile: TileConfig, shape: LaunchShape, arch: Arch, mean_fused_rows: float) -> str:
    rows = f"{mean_fused_rows:.4g} fused query rows per request on average"
    if tile.rows == SINGLE_ROW:
        return (
            f"{rows}: without tensor cores, {tile.warps} warps keep {tile.keys} keys in registers, "
            f"{shape.ctas_per_sm} CTAs per SM on {arch.name}"
        )
    share = "all warps share the rows and split the keys" if tile.rows == 16 else (
        f"each of {tile.warps} warps has {tile.rows // tile.warps} rows"
    )  # fmt: skip
    return (
        f"{rows}: {tile.rows} rows, "
        f"{share}; {tile.keys} keys in {tile.stages} stages take {shape.shared_bytes / 1024:.4g} "
        f"KiB of shared memory, of {arch.shared_per_cta // 1024} on {arch.name}: "
        f"{shape.ctas_per_sm} CTAs per SM"
    )


def _hopper_reason(tile: TileConfig, mean_fused_rows: float) -> str:
    groups = f"{tile.rows // GROUP_ROWS} groups of {GROUP_ROWS} rows"
    return (
        f"{mean_fused_rows:.4g} fused query rows per request on average: {groups} "
        f"take turns on Hopper's tensor cores; {tile.keys} keys in {tile.stages} stages and "
        f"{tile.query_stages} tiles of queries are what fits the shared memory"
    )


def _shared_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Size of `Arena` in templates/include/warploom/arena.cuh; a test compares the two."""
    if tile.rows == SINGLE_ROW:
        return single_shared_bytes(spec, tile)
    dim_qk, dim_v = round_up(spec.head_dim_qk, 32), round_up(spec.head_dim_v, 32)
    streams = tile.rows == STREAMED_ROWS
    staged = 2 * tile.rows * dim_qk * (1 + streams) + tile.stages * tile.keys * _key_bytes(spec)
    if spec.is_narrow:  # seats make 16-bit numbers of a whole tile
        seats = spec.variant.seats
        scales_weights = (
            scale_factors(seats.get("value_transform")) and spec.dtype.name != "float16"
        )
        transforms_values = "value_transform" in seats and not scales_weights
        staged += 2 * tile.keys * dim_qk * ("key_transform" in seats)
        staged += 2 * tile.keys * dim_v * transforms_values
    if spec.kv_format.block_kv:
        staged += 16 * (tile.stages + 1) * tile.keys  # addresses of keys and values
    if spec.kv_format.column_positions:
        staged += 4 * (tile.stages + 1) * tile.keys
    slab_rows = 16 * tile.warps
    output = 4 * slab_rows * (dim_v + 8) + 8 * slab_rows
    item = staged_item_bytes(spec.kv_format, tile)
    if streams:  # from item to item: nothing takes the place of anything
        return round_up(round_up(staged, 16) + output, 16) + 4 * item
    return round_up(max(staged, output), 16) + item


def _key_bytes(spec: AttentionSpec) -> int:
    """Bytes of a staged key and value, padded to whole swizzled blocks."""
    dims = spec.head_dim_qk, spec.head_dim_v
    if spec.is_narrow:
        return sum(round_up(dim, 64) for dim in dims)
    return sum(2 * round_up(dim, 32) for dim in dims)
