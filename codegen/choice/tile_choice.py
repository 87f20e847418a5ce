"""Which tile a CUDA kernel is compiled for: a pure function of spec, batch and architecture.

Batches of one fused row per request have their own template. For other batches the model of
`cost.py` chooses where a sweep was recorded; elsewhere the number of rows chooses the template,
and each template ranks its tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.attention.template import Work
from warploom.codegen.attention.templates import CUDA, SINGLE_ROW, template_of
from warploom.codegen.choice.cost import is_covered, predicted_us
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.errors import UnsupportedSpec


def choose_tile(
    spec: AttentionSpec,
    arch: Arch,
    mean_fused_rows: float,
    items_per_sm: float | None = None,
    mean_keys: float | None = None,
) -> TileChoice:
    """The tile for a batch: of one row, or the cheapest by a model of costs, or by rows.

    Args:
        spec: what to compute.
        arch: target architecture.
        mean_fused_rows: query rows x query heads per key/value head, mean over the requests.
        items_per_sm: requests x key/value heads for each SM; None: unknown, many are assumed.
        mean_keys: keys of a request; None: unknown. Only the model uses it.

    Returns:
        A tile that fits the architecture, and why it was chosen.

    Raises:
        UnsupportedSpec: no tile fits.
    """
    work = Work(
        mean_fused_rows,
        Work.items if items_per_sm is None else items_per_sm,
        Work.keys if mean_keys is None else mean_keys,
    )
    has_own = SINGLE_ROW.tiles(spec, arch, work)
    pool = [] if has_own else tiles_weighed(spec, arch)
    choice = _cheapest(spec, arch, pool, work) if pool else _by_rows(spec, arch, work)
    passed = (template.passed_over(spec, arch, work) for template in CUDA)
    return replace(choice, reason="; ".join([choice.reason, *filter(None, passed)]))


def tiles_weighed(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """Tiles that the cost model chooses from, most rows last; none where there is no model."""
    if not is_covered(spec, arch):
        return []
    recorded = (template for template in CUDA if arch.name in template.recorded)
    found = (tile for template in recorded for tile in template.weighed(spec, arch))
    return sorted(found, key=lambda tile: tile.rows)


def every_tile(spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
    """All fitting tiles that some batch may get, for measurements of the choice.

    The tile of one row is left out, since nothing competes with it.
    """
    works = [Work(rows, items) for rows in (2, 64, 128) for items in (1, Work.items)]
    offered = (template.tiles(spec, arch, work) for work in works for template in CUDA)
    found = (tile for tiles in offered for tile in tiles)
    return list(dict.fromkeys([*tiles_weighed(spec, arch), *found]))


def _by_rows(spec: AttentionSpec, arch: Arch, work: Work) -> TileChoice:
    """The best tile of the first template that has one for the batch's rows."""
    for template in CUDA:
        for tile in template.tiles(spec, arch, work)[:1]:
            reason = template.reason(spec, tile, arch, work) + template.rule(work)
            return TileChoice(tile, reason)
    raise UnsupportedSpec(
        what=f"head_dim {spec.head_dim_qk}/{spec.head_dim_v} on {arch.name}",
        reason="no tile fits its shared memory",
        remedy="Use a smaller head_dim.",
    )


def _cheapest(
    spec: AttentionSpec, arch: Arch, pool: Sequence[TileConfig], work: Work
) -> TileChoice:
    """The tile that the model predicts to be fastest."""
    known = [tile for tile in pool if template_of(tile).is_known(tile, work)] or pool[-1:]
    costs = {tile: predicted_us(spec, arch, tile, work) for tile in known}
    ranked = sorted(known, key=lambda tile: costs[tile])  # stable: the first of equals wins
    tile = ranked[0]
    reason = template_of(tile).reason(spec, tile, arch, work)
    given = f"{work.items:.3g} pairs of a request and a head for each SM and {work.keys:.4g} keys"
    return TileChoice(
        tile,
        reason=f"{reason}; the cheapest of {len(known)} by the model of costs, for {given}",
        costs=tuple((found.label, costs[found]) for found in ranked),
    )
