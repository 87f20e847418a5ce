"""One line about a plan, for the log."""

from __future__ import annotations

from warploom.codegen.source import TileChoice
from warploom.runtime.formats.batch import Batch
from warploom.runtime.strategies.strategy import Planned


def summary(batch: Batch, planned: Planned | None, choice: TileChoice | None, on_host: bool) -> str:
    """Requests, tile with the reason for it, work items, bytes of the workspace, and the planner.

    Args:
        batch: the batch.
        planned: the plan; None for the reference.
        choice: the choice of its tile.
        on_host: the plan lies on the host. A native plan on a device is not read back for this,
            since that would wait for the device.
    """
    requests = f"{batch.num_requests} requests"
    if planned is None:
        return f"{requests}, for the reference"
    tile = planned.kernel.tile
    template = "" if on_host else f"{tile.template} "
    sizes = [f"{own.rows} x {own.keys}" for own in tile.of_roles.values() or (tile,)]
    parts = [requests, f"tile {template}{' and '.join(sizes)}"]
    if choice is not None and choice.reason:
        parts[-1] += f" ({choice.reason})"
    if on_host or not planned.is_native:
        parts.append(f"{len(planned.plan.items)} items")
    return ", ".join([*parts, f"{planned.size.total} bytes", f"by {planned.by}"])
