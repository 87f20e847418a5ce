"""The step of a model as pieces, and which of them are captured together in which mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch

from warploom.errors import ArgumentError, WrongCall

Captured = Literal["always", "full", "never"]
Mode = Literal["full", "partial", "eager"]
MODES: tuple[Mode, ...] = ("full", "partial", "eager")  # the fewest launches first
Flow = tuple[torch.Tensor, ...]  # what one piece gives the next


@dataclass(frozen=True)
class GraphPiece:
    """A part of a step, and when it may be part of a graph.

    Attributes:
        function: called with what the piece before returned, in its order; parameters behind these
            that have the name of an input of the pool get that input. It returns one tensor or a
            tuple of tensors, each with the rows of the batch first. It must do the same when it is
            called again: the first batch of a bucket calls it twice, and up to five times where a
            budget is short.
        captured: "always", where the number of rows is all that changes from batch to batch;
            "full" is captured when the whole step is, and runs eagerly between graphs in partial
            mode (attention, whose plan is rewritten); "never" for what waits for the device or
            looks at values, so that there is no full mode.
    """

    function: Callable[..., Any]
    captured: Captured = "always"

    def __post_init__(self) -> None:
        """Raises ArgumentError for another word."""
        if self.captured not in ("always", "full", "never"):
            reason = f"is {self.captured!r}; expected 'always', 'full' or 'never'"
            raise ArgumentError(name="GraphPiece.captured", reason=reason)


@dataclass(frozen=True)
class Bound:
    """A piece with the names of the inputs that it takes.

    Attributes:
        name: for messages.
        places: names of the parameters that may be given by place.
    """

    name: str
    piece: GraphPiece
    wanted: tuple[str, ...]
    places: tuple[str, ...] = ()

    def __call__(self, flow: Flow, inputs: Mapping[str, torch.Tensor]) -> Any:
        given = self.places[: len(flow)]
        named = {name: inputs[name] for name in self.wanted if name not in given}
        return self.piece.function(*flow, **named)


@dataclass(frozen=True)
class Section:
    """Pieces in a row that are one graph, or are called between graphs."""

    pieces: tuple[Bound, ...]
    is_captured: bool


@dataclass(frozen=True)
class Step:
    """All pieces."""

    pieces: tuple[Bound, ...]

    @staticmethod
    def of(step: object, inputs: Sequence[str]) -> Step:
        """Read what a user gave; raises ArgumentError and WrongCall."""
        given = list(step) if isinstance(step, (list, tuple)) else [step]
        if not given:
            raise ArgumentError(name="step", reason="is empty; give a function, or some in a list")
        return Step(tuple(_bound(one, i, inputs) for i, one in enumerate(given)))

    def why_not(self, mode: Mode) -> str | None:
        """What keeps the step from a mode whatever the batch is, if anything."""
        kinds = {bound.piece.captured for bound in self.pieces}
        if mode == "full" and "never" in kinds:
            names = [one.name for one in self.pieces if one.piece.captured == "never"]
            return f"{', '.join(names)}: never captured"
        if mode == "partial" and "always" not in kinds:
            return "no piece is always captured"
        if mode == "partial" and kinds == {"always"}:
            return "all pieces are always captured, which is full mode"
        return None

    def sections(self, mode: Mode) -> tuple[Section, ...]:
        """What is captured, in its order, and what runs between."""
        if mode != "partial":
            return (Section(self.pieces, mode == "full"),)
        grouped = groupby(self.pieces, lambda bound: bound.piece.captured == "always")
        return tuple(Section(tuple(pieces), captured) for captured, pieces in grouped)


def _bound(given: object, place: int, inputs: Sequence[str]) -> Bound:
    piece = given if isinstance(given, GraphPiece) else GraphPiece(given)  # type: ignore[arg-type]
    function = piece.function
    if not callable(function):
        reason = f"{function!r} is no function; give functions, or GraphPiece(function, captured)"
        raise ArgumentError(name="step", reason=reason)
    name = getattr(function, "__qualname__", type(function).__qualname__).split(".")[-1]
    name = name if name != "<lambda>" else f"piece {place}"
    parameters = _parameters(function)
    kinds = inspect.Parameter
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    named = {one.name for one in parameters if one.kind not in (kinds.POSITIONAL_ONLY, *variadic)}
    takes_all = any(one.kind is kinds.VAR_KEYWORD for one in parameters)
    wanted = tuple(one for one in inputs if takes_all or one in named)
    needed = [one for one in parameters if one.default is kinds.empty and one.kind not in variadic]
    others = [one.name for one in needed if one.name not in wanted]
    if place == 0 and others:
        reason = (
            f"the first piece has parameters {', '.join(others)}, and inputs= names only "
            f"{', '.join(inputs)}; rename one"
        )
        raise WrongCall(function=name, reason=reason)
    places = tuple(one.name for one in parameters if one.kind in by_place)
    return Bound(name, piece, wanted, places)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a function or module; none of a function in C, whose parameters nobody can tell."""
    read = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(read).parameters.values())
    except (TypeError, ValueError):
        return []
