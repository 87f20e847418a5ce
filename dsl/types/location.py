"""Where in the user's file the running functor is: file, line and column, for error messages."""

from __future__ import annotations

import dis
import linecache
import sys
from collections import Counter
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

from warploom.dsl.types.ir import Source

_OURS = "warploom."
_SHIPPED = "warploom.dsl.library."  # shipped variants are functors like a user's
_BOUNDARY = (
    "warploom.dsl.variants.trace",
    "warploom.dsl.reference",
)  # above these, no functor runs
_LIBRARIES = ("numpy", "torch")


class Location(NamedTuple):
    """A point in running code, cheap to take; `source` reads the file."""

    code: CodeType
    instruction: int
    line: int


def here() -> Location | None:
    """The user's innermost running frame, or None if no functor is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in _BOUNDARY:
            return None
        if not _is_machinery(module):
            return Location(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None


def caller() -> Location | None:
    """The innermost running frame outside of warploom, for mistakes outside of functors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not _is_machinery(module) and not module.startswith(_SHIPPED):
            return Location(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None


def source(place: Location | None) -> Source | None:
    """Resolve a place; the column is 0 before Python 3.11, which does not record it."""
    if place is None:
        return None
    line, column = _position(place)
    return _source(place.code, line, column)


def recursing(error: RecursionError) -> Location | None:
    """The user's line that an endless recursion passed most often; the last may be any helper's."""
    found: Counter[Location] = Counter()
    step = error.__traceback__
    while step is not None:
        if not _is_machinery(str(step.tb_frame.f_globals.get("__name__", ""))):
            found[Location(step.tb_frame.f_code, step.tb_lasti, step.tb_lineno)] += 1
        step = step.tb_next
    return found.most_common(1)[0][0] if found else None


def raising(error: BaseException) -> Location | None:
    """The user's innermost line that an error has passed."""
    found = None
    step = error.__traceback__
    while step is not None:
        if not _is_machinery(str(step.tb_frame.f_globals.get("__name__", ""))):
            found = Location(step.tb_frame.f_code, step.tb_lasti, step.tb_lineno)
        step = step.tb_next
    return found


def is_of_library(error: BaseException) -> bool:
    """Whether Python code of torch or NumPy raised it."""
    module, step = "", error.__traceback__
    while step is not None:
        module = str(step.tb_frame.f_globals.get("__name__", ""))
        step = step.tb_next
    return module.partition(".")[0] in _LIBRARIES


def of_function(function: object) -> Source | None:
    """The line of a function's `def`, with the caret under it; None for built-ins."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, CodeType):
        return None
    found = _source(code, code.co_firstlineno, 0)
    indent = len(found.text) - len(found.text.lstrip())
    return Source(found.file, found.line, indent + 1, found.function, found.text)


def at_line(code: CodeType, line: int) -> Source:
    """A line of a function, without a column."""
    return _source(code, line, 0)


def line_of(step: dis.Instruction) -> int | None:
    """The line that begins at an instruction, if one does."""
    if sys.version_info >= (3, 13):  # there `starts_line` is a bool
        return step.line_number
    return step.starts_line


def reads_attribute(place: Location) -> bool:
    """Whether the instruction there is `x.name`; hasattr and getattr are calls."""
    return dis.opname[place.code.co_code[place.instruction]] in ("LOAD_ATTR", "LOAD_METHOD")


def _is_machinery(module: str) -> bool:
    if module.startswith(_SHIPPED):
        return False
    return module.startswith(_OURS) or module.partition(".")[0] in _LIBRARIES


def _position(place: Location) -> tuple[int, int]:
    if sys.version_info < (3, 11):
        return place.line, 0
    found = next(islice(place.code.co_positions(), place.instruction // 2, None), None)
    if found is None or found[0] is None or found[2] is None:
        return place.line, 0
    line, offset = found[0], found[2]
    # the offset counts UTF-8 bytes
    text = linecache.getline(place.code.co_filename, line).encode()
    return line, len(text[:offset].decode(errors="replace")) + 1


def _source(code: CodeType, line: int, column: int) -> Source:
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    return Source(code.co_filename, line, column, code.co_name, text)
