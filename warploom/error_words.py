"""Errors in the words of another library, whose calls are served by warploom's own.

What checks warploom's calls checks these, too, and its messages have warploom's names of arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from warploom.error_base import WarploomError


def renamed(
    error: WarploomError, texts: Mapping[str, str], names: Mapping[str, str]
) -> WarploomError | None:
    """An error of the same class with other names of arguments; None if nothing would change.

    Args:
        error: whose facts have warploom's names.
        texts: what to write for what, in every fact that is a text.
        names: what to write for the fact `name`, where it is all of it.
    """
    known = tuple(texts.items())
    facts = {key: _in(known, x) if isinstance(x, str) else x for key, x in error.facts.items()}
    if (name := error.facts.get("name")) in names:
        facts["name"] = names[str(name)]
    return None if facts == error.facts else type(error)(source=error.source, **facts)


def _in(texts: tuple[tuple[str, str], ...], text: str) -> str:
    known = dict(texts)
    return _pattern(tuple(known)).sub(lambda found: known[found[0]], text)


@lru_cache(maxsize=64)
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Any of them, the longest first, and no part of a longer name."""
    each = (re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![\w.])(?:{'|'.join(each)})(?!(?<=\w)\w)")
