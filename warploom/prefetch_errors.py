"""Errors of prefetching; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import ArgumentError, WarploomError


class BadBudget(ArgumentError):
    message = (
        "max_bytes is {got}; expected how many bytes may be brought into the cache, an integer "
        "from {least} on: no more than come while the collective runs, since its reader waits for "
        "what is late. Graph passes and beside() also take a SafeBudget, which chooses them."
    )


class BudgetNotChosen(BadBudget):
    message = (
        "max_bytes is a {got}, and this call takes bytes. Give budget.best(bytes)[0] of the "
        "bytes that are read, and its sms, budget.best(bytes)[1]; leave the call out where it is 0."
    )


class BudgetTooSmall(BadBudget):
    message = (
        "max_bytes is {got}, and {what} has {needed} bytes: nothing would be prefetched. Raise it, "
        "or leave the call out."
    )


class HasGaps(ArgumentError):
    message = (
        "{name} has shape {shape} and strides {strides}: memory between its elements belongs to "
        "other tensors. Give the tensor that it is a view of, or call .contiguous() once and keep "
        "what it returns."
    )


class CannotPrefetch(ArgumentError):
    message = "keys cannot be prefetched: {reason}. {remedy}"


class NoSuchAccelerator(WarploomError):
    message = "there is no accelerator {name!r} among {known}. Declare an Accelerator."


class NoArea(WarploomError):
    message = (
        "{name} has no area, so that nothing can be said for each mm2 of it. Give core_area and "
        "l2_area (dataclasses.replace)."
    )
