"""For `explain()`: why a batch of prefills and decodes has two roles, or one tile for all."""

from __future__ import annotations

from functools import partial

from warploom.env import mixed_roles
from warploom.runtime.formats.batch import HostBatch, OnDevice, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.mixes import may_be_mixed
from warploom.runtime.planning.rules import Rules
from warploom.runtime.strategies.strategy import Planned

_US = 1e-6  # microseconds in a picosecond


def why_roles(rules: Rules, planned: Planned, inputs: Inputs) -> str | None:
    """The rule that decided between two roles and one tile.

    Args:
        rules: rules of a wrapper on a GPU.
        planned: the wrapper's last plan.
        inputs: values that the mask of the last plan reads.

    Returns:
        The answer and its reason; None if the caller gave the tile, and for batches that are not
        mixed as far as the host knows.
    """
    options, batch = rules.options, planned.batch
    if options.tile is not None:
        return None
    if rules.always_has_roles:
        return "for all batches: bounds leave room for prefills beside decodes"
    is_unread = isinstance(batch, OnDevice)  # its sizes are the bounds'
    if not is_unread and not may_be_mixed(batch.sizes, rules.heads.group_size):
        return None
    why = _obstacle(rules, is_unread)
    return f"no: {why}" if why else _forecasts(rules, planned, inputs)


def _obstacle(rules: Rules, is_unread: bool) -> str | None:
    """The reason that forbids two roles; None if the expected times decide."""
    options = rules.options
    if not options.may_mix:
        setting = "the workspace is given, which may hold one tile only"
        return setting if mixed_roles() else "WARPLOOM_MIXED_ROLES=0 forbids them"
    if why := rules.obstacle_to_roles:
        return why
    if options.batch_invariant:
        return "batch_invariant=True wants one kernel for all batches"
    if rules.fixed is not None:
        return "cuda_graph=True wants one kernel, and bounds leave few prefills room beside decodes"
    if rules.mixes is None:
        return "bounds of no more rows than requests are taken for decodes alone"
    return "lengths lie on the device" if is_unread else None


def _forecasts(rules: Rules, planned: Planned, inputs: Inputs) -> str:
    """The decision, and the expected times that it compares."""
    assert rules.mixes is not None  # there is no obstacle
    count = partial(_count, rules, planned, inputs)
    lines = []
    for mix in rules.mixes.all:
        one, tile = rules.mixes.forecast(mix, rules.free_ctas, count), mix.choice.tile
        assert tile.decode is not None  # it has two roles
        taken = ", which was chosen" if tile == planned.choice.tile else ""
        lines.append(
            f"decodes by {tile.decode.label}: {_US * one.at_once:.1f} us expected, and "
            f"{_US * one.in_turn:.1f} by one tile for all{taken}"
        )
    decision = "yes" if planned.choice.tile.of_roles else "no"
    return f"{decision}, at the prices of an H200; " + "; ".join(lines)


def _count(rules: Rules, planned: Planned, inputs: Inputs, sizes: RoleSizes) -> RoleTiles:
    """Key tiles of the batch as it was planned, even if its index arrays have changed since."""
    batch = planned.batch
    if isinstance(batch, HostBatch):
        return rules.role_tiles(batch, inputs, sizes)
    segments, group_size = planned.arrays.segments, rules.heads.group_size
    return RoleTiles.of(segments, sizes, group_size, planned.visibility)
