"""Errors of several processes; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import WarploomError


class RankLost(WarploomError):
    """A rank of the group has ended, or did not answer in time.

    Who gets it should end, too: the group cannot be used any more. Ranks that wait for one that
    ended so name that one, so of several messages the first tells where it began.
    """

    message = (
        "rank {rank} of {world} was lost: {what} between it and rank {own} failed ({reason}). Its "
        "process has ended, or did not answer in time. Restart the group; a slow rank needs a "
        "larger timeout=."
    )


class OutOfStep(RankLost):
    """An earlier run failed after ranks had begun to exchange.

    Others may be ahead, and what is still under way could be taken for part of this run.
    """

    message = (
        "an earlier run on rank {own} of {world} failed in the midst of an exchange ({reason}), so "
        "that ranks are out of step. Make a new process group and a new wrapper over it, on all "
        "ranks."
    )


class TransferLost(WarploomError):
    """Pages did not arrive, or were not taken."""

    message = (
        "the hand-over of {what} was lost: {reason}. No page of it may be used. Prefill again, "
        "here or elsewhere; a slow peer needs a larger timeout=."
    )
