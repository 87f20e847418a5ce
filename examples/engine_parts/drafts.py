"""Two ways to guess tokens, which the model verifies in one pass (Leviathan et al. 2023)."""

from __future__ import annotations

from typing import Protocol

from engine_parts.requests import Forward, Part, Request


class Draft(Protocol):
    """Guesses how requests go on. A wrong guess costs time; it never changes what is generated."""

    def propose(self, counts: dict[Request, int]) -> dict[Request, list[int]]:
        """At most so many tokens for each request. All tokens but its last one are computed."""
        ...


class EarlyExit:
    """The first layers of the model itself (LayerSkip, Elhoushi et al. 2024).

    Such a draft needs no cache of its own: the keys and values that it writes for guessed tokens
    are those of the same layers of the model, which writes the same bits again as it verifies.
    """

    def __init__(self, forward: Forward, layers: int = 1) -> None:
        self._forward, self._layers = forward, layers

    def propose(self, counts: dict[Request, int]) -> dict[Request, list[int]]:
        drafts: dict[Request, list[int]] = {request: [] for request in counts}
        for length in range(max(counts.values(), default=0)):
            going = [request for request, count in counts.items() if count > length]
            parts = [
                Part(r.pages, r.computed + length, [(r.tokens[-1:] + drafts[r])[-1]]) for r in going
            ]
            chosen = self._forward(parts, self._layers).tolist()
            for request, token in zip(going, chosen, strict=True):
                drafts[request].append(token)
        return drafts


class PromptLookup:
    """What followed the last tokens where they stood before (prompt lookup, Saxena 2023)."""

    def __init__(self, match: int = 2) -> None:
        self._match = match

    def propose(self, counts: dict[Request, int]) -> dict[Request, list[int]]:
        return {request: self._guess(request.tokens, count) for request, count in counts.items()}

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        last = tokens[-self._match :]
        for begin in range(len(tokens) - self._match - 1, -1, -1):
            end = begin + self._match
            if tokens[begin:end] == last:
                return tokens[end : end + count]
        return []
