"""Requests to be served: drawn from a seed, or read from a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path

import numpy as np

from warploom.hints import hint
from warploom.simulation_errors import (
    BadSetup,
    BadTraceLine,
    EmptyTrace,
    NoTrace,
    UnknownTraceField,
)


@dataclass(frozen=True)
class Request:
    """One request; its end is known to the simulator, and to a schedule only as far as it says.

    Attributes:
        arrival: seconds from the beginning.
        prompt: tokens of it, at least one.
        output: tokens that it gets, at least one.
        cached: tokens of the prompt whose keys are there when it arrives, fewer than all: a prefix
            that is shared, or what an engine that prefills has handed over.

    Raises:
        BadSetup: one of them is out of its range.
    """

    arrival: float
    prompt: int
    output: int
    cached: int = 0

    def __post_init__(self) -> None:
        is_flag = isinstance(self.arrival, bool)
        if is_flag or not (isfinite(self.arrival) and self.arrival >= 0):
            raise BadSetup(name="arrival", got=self.arrival, expected="seconds from 0 on")
        for name in ("prompt", "output"):
            got = getattr(self, name)
            if isinstance(got, bool) or not isinstance(got, int) or got < 1:
                raise BadSetup(name=name, got=got, expected="an integer from 1 on, in tokens")
        is_count = isinstance(self.cached, int) and not isinstance(self.cached, bool)
        if not is_count or not 0 <= self.cached < self.prompt:
            expected = "an integer from 0 on, fewer tokens than the prompt"
            raise BadSetup(name="cached", got=self.cached, expected=expected)


FIELDS = tuple(one.name for one in fields(Request))
REQUIRED = FIELDS[:3]


def synthetic(
    count: int,
    *,
    seed: int = 0,
    rate: float | None = None,
    prompt: int = 1000,
    output: int = 1000,
    spread: float = 0.0,
    handed_over: bool = False,
) -> list[Request]:
    """Poisson arrivals with log-normal lengths; the same seed gives the same requests.

    Args:
        count: requests.
        seed: of the draw.
        rate: requests a second; None: all are there at the beginning.
        prompt, output: mean tokens.
        spread: standard deviation of the logarithm of a length; 0: all are equally long.
        handed_over: the keys of all but the last token of a prompt are there, as from an engine
            that prefills for others.

    Raises:
        BadSetup: no requests, a mean below one token, or a rate or spread that is none.
    """
    if count < 1:
        raise BadSetup(name="count", got=count, expected="at least one request")
    if rate is not None and not (isfinite(rate) and rate > 0):
        raise BadSetup(name="rate", got=rate, expected="requests a second above 0, or None")
    if not (isfinite(spread) and spread >= 0):
        raise BadSetup(name="spread", got=spread, expected="a finite number from 0 on")
    for name, mean in (("prompt", prompt), ("output", output)):
        if not (isfinite(mean) and mean >= 1):
            raise BadSetup(name=name, got=mean, expected="a mean of at least one token")
    draw = np.random.default_rng(seed)
    gaps = np.zeros(count) if rate is None else draw.exponential(1 / rate, count)
    lengths = (
        # the shift by half the variance keeps the mean
        np.maximum(1, np.rint(mean * draw.lognormal(-(spread**2) / 2, spread, count)))
        for mean in (prompt, output)
    )
    columns = (np.cumsum(gaps).tolist(), *(x.astype(int).tolist() for x in lengths))
    return [
        Request(arrival, tokens, out, tokens - 1 if handed_over else 0)
        for arrival, tokens, out in zip(*columns, strict=True)
    ]


def read_trace(path: Path | str) -> list[Request]:
    """Requests of a file of JSON lines, one object with arrival, prompt and output for each.

    Its `cached` may be there, too.

    Raises:
        NoTrace: there is no such file, or no text in it.
        EmptyTrace: no line has one.
        UnknownTraceField: a field that is none of a request's.
        BadTraceLine: no JSON object, a field is missing, or its value is no such number.
    """
    path = Path(path)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NoTrace(where=path, reason=reason) from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_request_of(line, path.name, number))
    if not found:
        raise EmptyTrace(where=path.name)
    return sorted(found, key=lambda request: request.arrival)


def _request_of(line: str, where: str, number: int) -> Request:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadTraceLine(where=where, line=number, reason=f"no JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise BadTraceLine(where=where, line=number, reason="no object")
    for name in record:
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise UnknownTraceField(
                where=where, line=number, name=name, hint=hint(name, FIELDS) or ".", known=known
            )
    if missing := [name for name in REQUIRED if name not in record]:
        raise BadTraceLine(where=where, line=number, reason=f"{', '.join(missing)} missing")
    try:
        found = Request(**record)
        return replace(found, arrival=float(found.arrival))
    except (BadSetup, TypeError, OverflowError) as error:
        raise BadTraceLine(where=where, line=number, reason=str(error).rstrip(".")) from None


def write_trace(requests: Iterable[Request], path: Path | str) -> None:
    """What `read_trace` reads."""
    Path(path).write_text("".join(json.dumps(asdict(one)) + "\n" for one in requests))
