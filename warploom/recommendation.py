"""Generative recommendation: beams over a shared prefix that end in valid items.

After xLLM (section 4.5). `docs/recommendation.md` begins with a whole search. Errors are those of
`warploom.recommendation_errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.lazy import lazy_names

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

if not TYPE_CHECKING:  # there the imports above say it
    __all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_names(__name__, "warploom.serving.recommendation", _HOME)
