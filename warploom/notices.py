"""Warnings about what works, but hardly as meant; errors are in `warploom.errors`."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OURS = ("warploom", "torch")
_told: set[tuple[str, int, str]] = set()


class CopyWarning(UserWarning):
    """A tensor is copied at each call, since kernels cannot reach it where it lies."""


class RowsBeforeKeys(UserWarning):
    """Rows of a request lie before all of its keys, as those of a right-padded batch do."""


class ManyConstants(UserWarning):
    """A number that a function captures has had many values, with a kernel for each."""


def warn_once(subject: str, text: str, category: type[UserWarning]) -> None:
    """Warn of a subject once for each place in the user's code."""
    file, line = _place(sys._getframe(1))
    if (file, line, subject) in _told:
        return
    warnings.warn_explicit(text, category, file, line)
    _told.add((file, line, subject))  # last, for filters that make it an error


def _place(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the innermost caller that is neither warploom nor torch."""
    last = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return frame.f_code.co_filename, frame.f_lineno
        last, frame = frame, frame.f_back
    return ("unknown", 0) if last is None else (last.f_code.co_filename, last.f_lineno)
