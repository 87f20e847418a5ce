"""Why a batch of prefills and decodes has two roles, or one tile for all, for `explain()`."""

from __future__ import annotations

from functools import partial

from warploom.codegen.choice.role_cost import Forecast
from warploom.runtime.formats.batch import HostBatch, OnDevice, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.mixes import may_be_mixed
from warploom.runtime.planning.rules import Rules
from warploom.runtime.strategies.strategy import Planned

_US = 1e-6  # of a picosecond


def why_roles(rules: Rules, planned: Planned, inputs: Inputs) -> str | None:
    """Which rule decided.

    Args:
        rules: of the wrapper, on a GPU.
        planned: its last plan.
        inputs: values that the mask reads, of the last plan.

    Returns:
        A sentence; None where the caller gave the tile, and for batches that are not mixed.
    """
    options, group_size = rules.options, rules.heads.group_size
    if options.tile is not None or not may_be_mixed(planned.batch.sizes, group_size):
        return None
    if rules.always_has_roles:
        return "for all batches: bounds leave room for prefills beside decodes"
    if not options.may_mix:
        return "no: the workspace is given, or WARPLOOM_MIXED_ROLES=0"
    if why := rules.obstacle_to_roles:
        return f"no: {why}"
    if rules.fixed is not None:
        return "no: one kernel serves all batches, by bounds or since batch_invariant=True"
    if rules.mixes is None:
        return "no: bounds have no more rows than requests, so that all decode"
    if isinstance(planned.batch, OnDevice):
        return "no: lengths lie on the device"
    forecasts = rules.mixes.forecasts(rules.free_ctas, partial(_count, rules, planned, inputs))
    tiles = (choice.tile.decode for choice in rules.mixes.choices)
    return "\n".join(
        _told(tile.label, one) for tile, one in zip(tiles, forecasts, strict=True) if tile
    )


def _count(rules: Rules, planned: Planned, inputs: Inputs, sizes: RoleSizes) -> RoleTiles:
    """Key tiles of the batch as it was planned, whatever has become of its index arrays."""
    batch = planned.batch
    if isinstance(batch, HostBatch):
        return rules.role_tiles(batch, inputs, sizes)
    segments, group_size = planned.arrays.segments, rules.heads.group_size
    return RoleTiles.of(segments, sizes, group_size, planned.visibility)


def _told(decodes: str, one: Forecast) -> str:
    answer = "yes" if one.pays else "no"
    return (
        f"{answer}, decodes by {decodes}: {_US * one.at_once:.1f} us expected, "
        f"by one tile for all {_US * one.in_turn:.1f}"
    )
