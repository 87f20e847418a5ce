"""Errors of the back ends for serving engines; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import ArgumentError, BoundsExceeded, UnsupportedSpec, WarploomError


class WrongEngineVersion(WarploomError):
    message = (
        "{engine} {got} is installed; warploom's back end was tested with {engine} {tested}, and "
        "does not serve others. Install one of these with: pip install '{requirement}'. {without}"
    )


class UnsupportedByEngine(UnsupportedSpec):
    """What a back end does not serve: a model or an option, told while it loads, or an argument of
    FlashInfer's calls, told when it is given."""

    message = "warploom does not serve {what} in {engine}: {reason}. {remedy}"


class BeyondGraph(BoundsExceeded):
    """A batch is larger than what FlashInfer's buffers for CUDA graphs, or the first plan, hold."""

    message = (
        "{got} {name} are more than CUDA graphs of this wrapper hold: {bound}, which is {by}. Make "
        "another wrapper, with more."
    )


class BadVariantChoice(ArgumentError):
    message = "{spec!r} chooses no variants: {reason}. Expected {expected}."
