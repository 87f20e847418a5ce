"""Where a picture may go: matplotlib decides by the ending of a file, and is asked beforehand."""

from __future__ import annotations

import os
from pathlib import Path

from warploom.errors import ArgumentError, MissingPackage


def picture_path(path: str | Path, what: str, others: tuple[str, ...] = ()) -> Path:
    """The path, if matplotlib writes files with its ending.

    Args:
        path: as a user gave it.
        what: draws there, for messages.
        others: endings that the caller writes without matplotlib.

    Raises:
        ArgumentError: an ending that nobody writes, or none, or no path.
        MissingPackage: matplotlib is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(name="path", reason=f"is {path!r}; expected the name of a file")
    target = Path(path)
    ending = target.suffix.lower()
    if ending in others:
        return target
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        requirement = "matplotlib>=3.8"
        raise MissingPackage(what=what, package="matplotlib", requirement=requirement) from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if ending[1:] not in known:  # without an ending, the file got another name
        first = ", ".join((*others, ".png", ".svg"))
        reason = f"{str(path)!r} ends in no format of pictures; end it in {first} or another of "
        raise ArgumentError(name="path", reason=reason + ", ".join(known))
    return target
