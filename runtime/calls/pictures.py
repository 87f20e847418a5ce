"""A check of a picture's path before drawing: the ending determines matplotlib's format."""

from __future__ import annotations

import os
from pathlib import Path

from warploom.errors import ArgumentError, MissingPackage


def picture_path(path: str | Path, what: str, others: tuple[str, ...] = ()) -> Path:
    """The path, if matplotlib writes files with its ending.

    Args:
        path: the user's argument.
        what: the function that draws, for messages.
        others: endings that the caller writes without matplotlib.

    Raises:
        ArgumentError: the ending is unknown or missing, or `path` is no path.
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
    if ending[1:] not in known:  # without an ending, matplotlib would change the name
        first = ", ".join((*others, ".png", ".svg"))
        reason = f"{str(path)!r} ends in no format of pictures; end it in {first} or another of "
        raise ArgumentError(name="path", reason=reason + ", ".join(known))
    return target
