"""Checks of a wrapper's options, and the kernel specs that follow from them, without a device."""

from __future__ import annotations

from typing import Any

from warploom.codegen.attention.templates import CUDA
from warploom.codegen.lowering.specialize import for_group_size
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.env import mixed_roles
from warploom.errors import ArgumentError
from warploom.runtime.declaring.declare import check_bounds, checked_count, checked_flag
from warploom.runtime.formats.base import Format
from warploom.runtime.launching.pretransformed_keys import (
    KeyTransform,
    Way,
    obstacle_to_pretransform,
    pretransform_rows,
    reason_for_fused,
)
from warploom.runtime.planning.rules import Options
from warploom.runtime.planning.visibility import Heads
from warploom.scheduler.model.bounds import Bounds

_TEMPLATES = sorted({template.name for template in CUDA})


def checked_options(
    spec: AttentionSpec,
    backend: str,
    planned_format: Format[Any],
    group_size: int,
    *,
    bounds: Bounds | None,
    cuda_graph: bool,
    batch_invariant: bool,
    sm_limit: int | None,
    tile: TileConfig | None,
    key_transform: Way,
    workspace: Any = None,
) -> tuple[Options, KeyTransform]:
    """The checked options of a wrapper, whose constructor documents the arguments.

    Args:
        spec: the declaration.
        backend: the back end that it will run on.
        planned_format: the format as planners use it.
        group_size: query heads per key/value head.
        bounds, cuda_graph, batch_invariant, sm_limit, tile, key_transform, workspace: as given.

    Raises:
        ArgumentError: an option is wrong, or options contradict each other.
    """
    cuda_graph = checked_flag("cuda_graph", cuda_graph)
    batch_invariant = checked_flag("batch_invariant", batch_invariant)
    if bounds is not None:
        check_bounds(bounds, planned_format)
    if sm_limit is not None:
        checked_count("sm_limit", sm_limit)
    if tile is not None:
        _check_tile(tile, group_size)
    if cuda_graph and bounds is None:
        raise ArgumentError(name="bounds", reason="cuda_graph=True needs them")
    obstacle = obstacle_to_pretransform(spec, backend, cuda_graph, batch_invariant)
    for_fused = reason_for_fused(sm_limit, workspace)
    transform = KeyTransform.of(
        key_transform, tile is not None, obstacle, for_fused, pretransform_rows(spec)
    )
    may_mix = workspace is None and mixed_roles()  # two roles need more memory than one tile
    is_native = planned_format.native_storage is not None
    options = Options(bounds, cuda_graph, batch_invariant, sm_limit, tile, may_mix, is_native)
    return options, transform


def _check_tile(tile: Any, group_size: int) -> None:
    """Raise ArgumentError if `tile` is not valid on any back end."""
    if not isinstance(tile, TileConfig):
        raise ArgumentError(name="tile", reason=f"is {tile!r}; expected a TileConfig or None")
    _check_sizes(tile)
    if tile.decode is not None:
        _check_roles(tile, tile.decode, group_size)
        _check_sizes(tile.decode)
        if tile.decode.rows < group_size:
            reason = (
                f"has {tile.decode.rows} rows for decodes; expected {group_size} or more: a query "
                f"row is one for each of the {group_size} query heads of a key/value head, so that "
                "no request would be a decode"
            )
            raise ArgumentError(name="tile", reason=reason)


def _check_sizes(tile: TileConfig) -> None:
    for name in ("rows", "keys", "warps", "stages", "query_stages"):
        checked_count(f"tile.{name}", getattr(tile, name))
    if tile.template not in _TEMPLATES:
        reason = (
            f"there is no template {tile.template!r}; expected {' or '.join(map(repr, _TEMPLATES))}"
        )
        raise ArgumentError(name="tile", reason=reason)


def _check_roles(tile: TileConfig, decode: Any, group_size: int) -> None:
    """Raise ArgumentError if no launch can have `decode` beside the tile for prefills."""
    if not isinstance(decode, TileConfig):
        reason = f"has decode={decode!r}; expected a TileConfig or None"
    elif decode.decode is not None:
        reason = "has a `decode` that has one itself; there are two roles"
    elif not 1 <= decode.rows < tile.rows:
        most = tile.rows - 1
        reason = (
            f"has {decode.rows} rows for decodes; expected {min(group_size, most)} to {most}, "
            f"fewer than the {tile.rows} of the tile for prefills"
        )
    else:
        return
    raise ArgumentError(name="tile", reason=reason)


def kernel_parts(
    spec: AttentionSpec, heads: Heads, transform: KeyTransform
) -> tuple[AttentionSpec, PretransformSpec | None, bool]:
    """Arguments of `KernelChoice`: spec, pretransform kernel or None, whether it always runs."""
    made = for_group_size(spec, heads.group_size)
    pretransform = PretransformSpec.of(made, heads.num_kv) if transform.may_be_before else None
    return made, pretransform, transform.way == "before"
