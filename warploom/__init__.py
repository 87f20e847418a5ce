"""warploom: write attention variants in Python, run them as compiled kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.dsl.formats import BlockSparse as BlockSparse
    from warploom.dsl.formats import Dense as Dense
    from warploom.dsl.formats import Paged as Paged
    from warploom.dsl.formats import Ragged as Ragged

__version__ = "0.1.0"

_HOME = {
    "BlockSparse": "warploom.dsl.formats",
    "Dense": "warploom.dsl.formats",
    "Paged": "warploom.dsl.formats",
    "Ragged": "warploom.dsl.formats",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
