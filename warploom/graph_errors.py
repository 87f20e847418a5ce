"""Errors of graph pools; the others are in `warploom.errors`."""

from __future__ import annotations

from typing import Any

from warploom.errors import ArgumentError, BoundsExceeded, InUse, WarploomError


class GraphError(WarploomError):
    """Base of what can be wrong with a graph pool, its step, or a batch."""


# --- what cannot be captured ----------------------------------------------------------------------


class CaptureFailed(GraphError):
    """Nothing is kept of it: other captures, and the eager mode, still serve."""

    message = (
        "{what} could not be captured: {reason}. Nothing in a step may wait for the device or ask "
        "it for a value (.item(), .cpu(), nonzero, masks as indices), plan, or copy from the host. "
        "Make the part that does so a GraphPiece(..., captured='never'), call with mode='eager', "
        "or let on_failure='eager' do that for such batches."
    )

    def __init__(self, *, reason: str, **facts: Any) -> None:
        super().__init__(reason=reason.rstrip("."), **facts)  # that of others may be a sentence


class DataDependent(CaptureFailed):
    """What the step computes next, or its shape, follows from values on the device."""


class NotStatic(GraphError):
    """A replay could not rewrite what the step returned."""

    message = (
        "{piece} returned {what}, which a replay cannot rewrite; expected one tensor or a tuple of "
        "tensors on {device}, each with the {rows} rows of the batch as its first dimension. "
        "{remedy}"
    )

    def __init__(
        self, *, remedy: str = "Compute everything else in plan, or behind run.", **facts: Any
    ) -> None:
        super().__init__(remedy=remedy, **facts)


class InputWritten(GraphError):
    """Rows of padding would be written again and again, and drift."""

    message = (
        "the step writes to its input {name}, in place. Inputs are buffers of the pool, whose rows "
        "of padding stay from batch to batch: write to a clone, or to memory of your own."
    )


class OutputsChanged(GraphError):
    """Captures share their outputs' memory, so that these are alike for all batches."""

    message = (
        "the step returned {got}, and {before} before. Return the same number of tensors, of the "
        "same types and shapes but for the rows, for every batch; leave out what is only "
        "sometimes there."
    )


class BudgetBelowCapture(GraphError):
    """A capture that has the whole budget to itself does not fit it; it is given up."""

    message = (
        "max_bytes is {got}, and {what} alone takes {needed} bytes or more. Raise max_bytes, lower "
        "full_rows or partial_rows so that such batches run eagerly, or let on_failure='eager' do "
        "that."
    )


# --- batches --------------------------------------------------------------------------------------


class PoolBoundsExceeded(GraphError, BoundsExceeded):
    """A batch with more rows than the pool was declared for."""


class WrongInputs(GraphError, ArgumentError):
    message = (
        "inputs {reason}. This pool takes {known}, each with one row for each row of the batch."
    )


class NoSuchMode(GraphError, ArgumentError):
    """A mode was asked for by name, and cannot serve this batch."""

    message = "mode={mode!r} cannot serve {rows} rows: {reason}. Leave mode out to have one chosen."


# --- calls out of order ---------------------------------------------------------------------------


class PoolInUse(GraphError, InUse):
    message = (
        "this GraphPool is in use by {user}. Its buffers hold one batch at a time: give each "
        "thread a pool of its own, or let threads hold a lock of yours until they have read the "
        "outputs."
    )


class PoolClosed(GraphError):
    message = "this GraphPool is closed: its captures are gone. Make another one."


class CaptureGone(GraphError):
    """The host's twin found what a device would not tell: it would compute with other data."""

    message = "a replay of {what} would read memory that is gone: {reason}. {remedy}"
