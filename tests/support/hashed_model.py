"""A stand-in for the model of the example engine that betrays every wrong page.

It stores each token in the slot where its keys and values would be, and the next token is a hash of
all tokens that a row finds through its pages. What a request alone gets needs no pages at all.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

VOCABULARY = 3  # few, so that requests begin alike and guesses come true


class Part(Protocol):
    """As in examples/engine_parts/requests.py."""

    pages: list[int]
    begin: int
    tokens: list[int]


def following(tokens: list[Any], layers: int | None) -> int:
    """The next token; after the first layers alone a guess, right in three of four cases."""
    mixed = 17
    for token in tokens:
        mixed = (mixed * 1_000_003 + token + 1) % 2_147_483_647
    wrong = layers is not None and mixed // VOCABULARY % 4 == 0
    return (mixed + wrong) % VOCABULARY


def generated_alone(prompt: list[int], count: int, stop: int | None) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(following(tokens, None))
        if tokens[-1] == stop:
            break
    return tokens


class HashedModel:
    """Computes parts of requests as the example's `PagedModel` does.

    Attributes:
        most_rows: rows of the largest pass of all layers.
    """

    def __init__(self, page_size: int) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self._size, self.most_rows = page_size, 0

    def __call__(self, parts: list[Any], layers: int | None) -> torch.Tensor:
        chosen: list[int] = []
        written: set[int] = set()
        for part in parts:
            slots = [divmod(place, self._size) for place in range(part.begin + len(part.tokens))]
            places = [(part.pages[page], slot) for page, slot in slots]
            pages = {page for page, _ in places[part.begin :]}
            assert part.tokens and not pages & written, "a page with two writers"
            written |= pages
            self._slots.update(zip(places[part.begin :], part.tokens, strict=True))
            read = [self._slots[place] for place in places]
            ends = range(part.begin + 1, len(places) + 1)
            chosen += [following(read[:end], layers) for end in ends]
        if layers is None:
            self.most_rows = max(self.most_rows, len(chosen))
        return torch.tensor(chosen)
