"""Errors of generative recommendation; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import ArgumentError, WarploomError


class BadItems(ArgumentError):
    message = (
        "items {reason}. Expected [items, tokens of each] integers from 0 on, one row for each "
        "item that may be recommended."
    )


class NoValidItem(WarploomError):
    message = (
        "no valid item is left: {reason}. Give logits that are finite for tokens of some item of "
        "the table, or a table that has the items in question."
    )


class TooFewCandidates(ArgumentError):
    message = (
        "{name} is {got}, but there are {candidates}, {what}. Lower it, or give each beam more "
        "candidates."
    )


class Unsorted(ArgumentError):
    message = (
        "scores of beam {beam} rise from {before} to {behind}, and each row is to be in descending "
        "order. Sort it, as torch.topk does: -numpy.sort(-scores, axis=1)."
    )


class WidthChanged(ArgumentError):
    message = (
        "{name} has {got} rows, but there are {expected} beams now. Each step takes one row for "
        "each beam, in the order in which the step before returned them."
    )


class BadParent(ArgumentError):
    message = "parents[{index}] is {value}; {valid}."


class NoNumbers(ArgumentError):
    message = (
        "logits of beam {beam} hold NaN or +inf, so no token of it is the best. Look for what made "
        "them in the model; -inf is how a token is forbidden."
    )


class SearchDone(ArgumentError):
    message = "items have {steps} tokens. {remedy}"


class TooFewPages(WarploomError):
    message = (
        "beams need {needed} more pages, and {free} of their {own} are free. Give BeamPages as "
        "many as BeamPages.pages_needed says, or keep fewer beams."
    )
