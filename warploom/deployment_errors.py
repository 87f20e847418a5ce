"""Errors of kernels that were built elsewhere, or ahead; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import NoHostCompiler


class WrongProcessor(NoHostCompiler):
    message = (
        "no C++ compiler was found, and the kernels in {root} were compiled for another processor. "
        "They need: {needs}. This one has: {has}. It lacks: {lacks}. Fill the cache on a machine "
        "of this kind, or install a compiler."
    )


class NotInCache(NoHostCompiler):
    message = (
        "{kernel} is not among the kernels in {root}, and there is no C++ compiler to make it. "
        "Build it where there is one (warploom build), and bring it here with warploom export and "
        "import; or install a compiler."
    )
