"""Errors of virtual caches and of their pools; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import ArgumentError, WarploomError


class VirtualMemoryError(WarploomError):
    """Base of what can be wrong with a memory pool or a virtual cache."""


# --- what the machine does not give ---------------------------------------------------------------


class NoVirtualMemory(VirtualMemoryError):
    message = "there is no virtual memory management for {device}: {reason}. {remedy}"


class ReservationFailed(VirtualMemoryError):
    message = (
        "{size} of addresses could not be reserved ({reason}). They need no memory, but addresses "
        "are not endless either: lower max_requests or max_tokens, or raise the limit of address "
        "space (ulimit -v)."
    )


class PageFailed(VirtualMemoryError):
    """The driver refused to make, map, unmap or give back a page; nothing has changed."""

    message = "{call} failed for {size}: {reason}. {remedy}"


# --- what does not fit ----------------------------------------------------------------------------


class BudgetTooSmall(VirtualMemoryError, ArgumentError):
    message = "{name} is {got} bytes; expected at least {needed}, {what}."


class BudgetTooLarge(VirtualMemoryError, ArgumentError):
    message = (
        "num_bytes is {got}; {device} has {total} bytes of memory in all. Make a smaller pool, and "
        "leave some for the model."
    )


class OutOfPages(VirtualMemoryError):
    """Base of the two reasons why a model gets no more pages; nothing has changed."""

    message = "{model} needs {needed} more pages of {page_bytes} bytes, {reason}. {remedy}"


class PoolExhausted(OutOfPages):
    """The pool has no page that the model may take."""


class LimitReached(OutOfPages):
    """The model has all pages that its own limit allows."""


class OutOfSlots(VirtualMemoryError):
    message = (
        "all {slots} places of {model} have a request. Release one, or declare a larger "
        "max_requests: addresses cost no memory."
    )


class RequestTooLong(VirtualMemoryError, ArgumentError):
    message = (
        "request {request!r} would have {tokens} tokens; {model} has addresses for {most}. Declare "
        "a larger max_tokens: addresses cost no memory."
    )


# --- calls out of order ---------------------------------------------------------------------------


class NotReserved(VirtualMemoryError, ArgumentError):
    message = (
        "{model} holds no request {request!r}: it was never reserved, or is released already. Call "
        "reserve() first, and release() once."
    )


class AlreadyReserved(VirtualMemoryError, ArgumentError):
    message = (
        "{model} holds request {request!r} already. Release it first, or give each request a name "
        "of its own."
    )


class MemoryClosed(VirtualMemoryError):
    message = "{what} is closed: its pages are given back, and its tensors must not be used."


class OtherProcess(VirtualMemoryError):
    message = (
        "this memory pool belongs to process {owner}, and this one was forked from it. Make a pool "
        "of its own in each process."
    )


class PageStateBroken(VirtualMemoryError):
    message = "the states of pages break an invariant: {reason}. This is a bug of warploom."
