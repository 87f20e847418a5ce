"""What an engine is asked for, and the part of it that one forward pass computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from engine_parts.pages import Node

State = Literal["waiting", "running", "done", "cancelled"]


@dataclass(eq=False)
class Request:
    """The handle of a request: `tokens` grow until its state is "done" or "cancelled".

    Attributes:
        tokens: the prompt, and what was generated behind it.
        prompt_length: how many of them were given.
        limit: the largest number of tokens.
        stop: a token that ends the request, or None.
        state: where it stands.
        computed: its first tokens whose keys and values lie in its pages.
        pages: pages of the cache, in the order of its tokens.
        nodes: nodes of the page tree that hold the first of these pages, shared and full.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    stop: int | None = None
    state: State = "waiting"
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: list[int]) -> None:
        """Take generated tokens, up to the limit or a stop."""
        for token in tokens:
            if self.state != "done":
                self.tokens.append(token)
                if token == self.stop or len(self.tokens) == self.limit:
                    self.state = "done"


class Part(NamedTuple):
    """A request's share of a pass: `tokens`, at positions from `begin` on, attend to its pages."""

    pages: list[int]
    begin: int
    tokens: list[int]

    @property
    def end(self) -> int:
        """Keys that the last of them sees."""
        return self.begin + len(self.tokens)


# Parts, and how many layers to go through (None: all) -> the next token of every row, [rows] int64
Forward = Callable[[list[Part], int | None], torch.Tensor]
