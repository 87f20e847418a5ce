"""Random requests that come and go, and what each must get: the tokens that it would get alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from engine_parts.pages import PageTree
from engine_parts.requests import Forward, Part, Request

if TYPE_CHECKING:  # the engine imports this module
    from engine import Engine

SYSTEMS, DOCUMENTS = 5, 4  # beginnings that prompts share, and what may follow each of them
LONGEST_SYSTEM, LONGEST_DOCUMENT, LONGEST_OWN, LONGEST_OUTPUT = 80, 40, 40, 24  # tokens
ARRIVALS, BACKLOG = 2.0, 40  # requests for each step, and of those waiting at most
PATIENCE = 40  # steps after which a request that will be cancelled is, at most
STOP = 0  # a token that ends every other request


class Traffic:
    """A number of requests for one engine, some of which are cancelled.

    Attributes:
        requests: all that were submitted.
    """

    def __init__(self, count: int, cancelled: float, vocabulary: int, seed: int) -> None:
        self.requests: list[Request] = []
        self._left, self._cancelled, self._vocabulary = count, cancelled, vocabulary
        self._random = np.random.default_rng(seed)
        systems = [self._text(0, LONGEST_SYSTEM) for _ in range(SYSTEMS)]
        self._beginnings = [
            system + self._text(0, LONGEST_DOCUMENT)
            for system in systems
            for _ in range(DOCUMENTS)
        ]  # fmt: skip
        self._steps = 0
        self._leaving: dict[Request, int] = {}  # and after which step

    def feed(self, engine: Engine) -> bool:
        """Submit and cancel what is due before a step; whether there is anything left to do."""
        for _ in range(min(self._left, self._random.poisson(ARRIVALS))):
            if len(engine.waiting) < BACKLOG:
                self._submit(engine)
        for request in [r for r, due in self._leaving.items() if due <= self._steps]:
            engine.cancel(request)
            del self._leaving[request]
        self._steps += 1
        return engine.busy or self._left > 0

    def _submit(self, engine: Engine) -> None:
        beginning = self._beginnings[self._random.integers(len(self._beginnings))]
        prompt = beginning + self._text(1, LONGEST_OWN)
        length = int(self._random.integers(1, LONGEST_OUTPUT + 1))
        stop = STOP if self._random.random() < 0.5 else None
        request = engine.submit(prompt, length, stop)
        self.requests.append(request)
        self._left -= 1
        if self._random.random() < self._cancelled:
            self._leaving[request] = self._steps + int(self._random.integers(PATIENCE))

    def _text(self, shortest: int, longest: int) -> list[int]:
        length = self._random.integers(shortest, longest + 1)
        return self._random.integers(self._vocabulary, size=length).tolist()


def alone(forward: Forward, request: Request, tree: PageTree) -> list[int]:
    """What a request should have: its prompt in one pass, then token by token, and nobody beside.

    No engine has a part in it. Pages are those of an unused tree. A cancelled request is followed
    as far as it came.
    """
    tokens, begin = request.tokens[: request.prompt_length], 0
    pages = list(range(tree.pages_for(request.limit)))
    limit = request.limit if request.state == "done" else len(request.tokens)
    while len(tokens) < limit:
        token = int(forward([Part(pages, begin, tokens[begin:])], None)[-1])
        begin = len(tokens)
        tokens.append(token)
        if token == request.stop:
            break
    return tokens
