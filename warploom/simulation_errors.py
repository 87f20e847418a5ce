"""Errors of simulated schedules; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import ArgumentError, WarploomError


class SimulationError(WarploomError):
    """Base of what can be wrong with a simulation."""


# --- what is asked for ----------------------------------------------------------------------------


class BadCost(SimulationError, ArgumentError):
    message = "{name} is {got}; a cost is a finite number of {unit}, from {least} on."


class BadSplit(SimulationError, ArgumentError):
    message = (
        "the streams get {shares} of the SMs, {total} together; expected more than 0 % for each "
        "and at most 100 % together. Lower one of them."
    )


class BadSetup(SimulationError, ArgumentError):
    message = "{name} is {got}; expected {expected}."


class NeverFits(SimulationError):
    message = (
        "request {request} has {tokens} tokens of prompt and output, and a group keeps {capacity}: "
        "it would wait for ever. Raise kv_tokens of the limits, or leave the request out."
    )


# --- what is read ---------------------------------------------------------------------------------


class NoTrace(SimulationError):
    message = (
        "{where} cannot be read ({reason}). Expected a text file of JSON lines, as write_trace "
        "writes it; synthetic(count) draws requests without one."
    )


class EmptyTrace(SimulationError):
    message = "{where} has no request. A trace has one for each line, and at least one."


class BadTraceLine(SimulationError):
    message = (
        '{where}, line {line}: {reason}. Expected {{"arrival": seconds, "prompt": tokens, '
        '"output": tokens}}.'
    )


class UnknownTraceField(BadTraceLine):
    message = "{where}, line {line}: unknown field {name!r}{hint} Known are {known}."


class NoMeasurement(SimulationError):
    message = "{file} has no figure of {what}. Run {command} on the machine to be modelled."
