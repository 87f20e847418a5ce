"""Errors in FlashInfer's words: what warploom calls an argument becomes what the caller called it.

Calls are checked by what checks warploom's own, whose messages have its names. They are told anew
where they leave FlashInfer's calls, with the first error as cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from warploom.engine_errors import BeyondGraph
from warploom.error_base import WarploomError
from warploom.error_words import renamed
from warploom.errors import BoundsExceeded

Call = TypeVar("Call", bound=Callable[..., Any])

Words: TypeAlias = Mapping[str, str]  # warploom's, and FlashInfer's

# warploom's names -> FlashInfer's, in any text
_WORDS = {
    "num_q_heads": "num_qo_heads",
    "head_dim_v": "head_dim_vo",
    "rope_factor": "rope_scale",
    "kv_dtype": "kv_data_type",
    "dtype=": "q_data_type=",
    "dtype torch": "q_data_type torch",
    "with dtype": "with q_data_type",
    "layout=": "kv_layout=",
}
# the same, where they stand for an argument alone: they are words of other texts, too
_NAMES = {
    "dtype": "q_data_type",
    "left": "window_left",
    "cap": "logits_soft_cap",
    "sink": "sinks",
    "kv": "paged_kv_cache",
    "packed_mask": "packed_custom_mask",
    "Bounds.max_q_rows": "the rows of the first plan",
    "Bounds.max_kv_len": "the keys of the first plan",
}
# bounds of graphs -> what they count, and where they come from unless a class says it
_LIMITS = {
    "max_q_rows": ("rows", "what the first plan had"),
    "max_kv_len": ("keys of a request", "what the first plan had"),
}


def in_words_of_its_class(call: Call) -> Call:
    """Decorates methods; a `Facade` has the words that are its own, and where bounds come from."""

    @wraps(call)
    def telling(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(self, *args, **named)
        except WarploomError as error:
            raise_told(error, self.words, self.pages_of_graphs)

    return cast(Call, telling)


def in_words(**words: str) -> Callable[[Call], Call]:
    """Decorates functions; `words` are names of arguments in messages, and FlashInfer's."""

    def decorate(call: Call) -> Call:
        @wraps(call)
        def telling(*args: Any, **named: Any) -> Any:
            try:
                return call(*args, **named)
            except WarploomError as error:
                raise_told(error, words)

        return cast(Call, telling)

    return decorate


def raise_told(error: WarploomError, words: Words, pages: str = "") -> NoReturn:
    """Raise an error that is being handled, in these words.

    Args:
        error: whose facts have warploom's names.
        words: names of arguments there, beside those that all calls have, and FlashInfer's. Those
            of letters alone are words of English, too, and hold where they are the name.
        pages: the buffer that bounds pages of graphs.
    """
    told = _told(error, words, pages)
    if told is None:
        raise error
    raise told from error


def _told(error: WarploomError, words: Words, pages: str) -> WarploomError | None:
    """The error anew; None if nothing would change."""
    limits = _LIMITS
    if pages:
        by = f"the length of {pages}"
        limits = limits | {"max_blocks": ("pages", by), "max_kv_len": ("keys of a request", by)}
    name = error.facts.get("name")
    if isinstance(error, BoundsExceeded) and name in limits:
        counted, by = limits[str(name)]
        got, bound = error.facts["got"], error.facts["bound"]
        return BeyondGraph(name=counted, by=by, got=got, bound=bound)
    texts = _WORDS | {mine: theirs for mine, theirs in words.items() if not mine.isalpha()}
    return renamed(error, texts, _NAMES | dict(words))
