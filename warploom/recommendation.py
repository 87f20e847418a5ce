"""Generative recommendation: beams over a shared prefix that end in valid items.

After xLLM (section 4.5). `docs/recommendation.md` begins with a whole search. Errors are those of
`warploom.recommendation_errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.serving.recommendation.items import ItemMask as ItemMask
    from warploom.serving.recommendation.items import ItemTable as ItemTable
    from warploom.serving.recommendation.pages import BeamPages as BeamPages
    from warploom.serving.recommendation.pages import Copies as Copies
    from warploom.serving.recommendation.search import BeamSearch as BeamSearch
    from warploom.serving.recommendation.search import Recommended as Recommended
    from warploom.serving.recommendation.search import Selection as Selection
    from warploom.serving.recommendation.top_k import TopK as TopK
    from warploom.serving.recommendation.top_k import heap_top_k as heap_top_k
    from warploom.serving.recommendation.top_k import sorted_top_k as sorted_top_k

_HOME = {
    "ItemMask": "items",
    "ItemTable": "items",
    "BeamPages": "pages",
    "Copies": "pages",
    "BeamSearch": "search",
    "Recommended": "search",
    "Selection": "search",
    "TopK": "top_k",
    "heap_top_k": "top_k",
    "sorted_top_k": "top_k",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"warploom.serving.recommendation.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
