"""Beam search over the tokens of items: masks, the best of each beam, and the best of all.

xLLM's generative recommendation (section 4.5): logits and the mask of valid tokens are added, each
beam offers its best candidates in descending order, and `sorted_top_k` takes the best of all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from warploom.errors import ArgumentError, WrongDType, WrongShape
from warploom.recommendation_errors import NoNumbers, NoValidItem, SearchDone, WidthChanged
from warploom.runtime.declaring.declare import checked_count
from warploom.serving.recommendation.items import ItemMask, ItemTable
from warploom.serving.recommendation.top_k import sorted_top_k

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Selection(NamedTuple):
    """The beams that a step keeps, best first.

    Attributes:
        parents: int64 [beams], which beam of the step before each continues.
        tokens: int64 [beams], the token it adds.
        scores: float64 [beams], sums of log-probabilities.
        seen: candidates that the selection looked at.
        candidates: how many there were.
    """

    parents: Ints
    tokens: Ints
    scores: Floats
    seen: int
    candidates: int


class Recommended(NamedTuple):
    """Items, best first.

    Attributes:
        items: int64 [beams], rows of the table that the search was given.
        tokens: int64 [beams, steps].
        scores: float64 [beams], log-probabilities.
    """

    items: Ints
    tokens: Ints
    scores: Floats


class BeamSearch:
    """One search: a step for each token of an item, and then the best items.

    It begins with one beam. A step keeps `width` beams, or as many as there are candidates that
    lead to items. Probabilities are those among valid tokens, since the mask is added before the
    softmax, as in the paper.

    Attributes:
        width: most beams.
        level: tokens that are chosen.
    """

    def __init__(self, mask: ItemMask, width: int, candidates: int | None = None) -> None:
        """Begin.

        Args:
            mask: of the table of items, on the device of the logits. It may serve several searches,
                in one thread; a step whose mask another has overwritten writes it again.
            width: most beams, at most as many as the mask has rows.
            candidates: of each beam (the paper's top_k). By default as many as the width, with
                which nothing is missed; fewer are faster.

        Raises:
            ArgumentError: counts below one, or no mask.
            WidthChanged: the mask has fewer rows.
        """
        if not isinstance(mask, ItemMask):
            reason = f"is of type {type(mask).__name__}; expected ItemMask(table of items, width)"
            raise ArgumentError(name="mask", reason=reason)
        checked_count("width", width)
        if width > mask.width:
            raise WidthChanged(name="the mask", got=mask.width, expected=f"up to {width}")
        if candidates is not None:
            checked_count("candidates", candidates)
        self.width, self.level = width, 0
        self._mask, self._items = mask, mask.items
        self._candidates = min(candidates or width, mask.items.vocab_size)
        self._nodes: Ints = np.zeros(1, np.int64)
        self._scores: Floats = np.zeros(1)
        self._written: torch.Tensor | None = None
        self._write_number = 0  # which one of the mask's it was

    def __len__(self) -> int:
        """Beams there are."""
        return len(self._nodes)

    @property
    def items(self) -> ItemTable:
        """The table."""
        return self._items

    def prepare(self) -> torch.Tensor:
        """Write the mask of the coming step; a call while the device computes logits hides it.

        Returns:
            float32 [beams, vocabulary]; `step` writes it otherwise.

        Raises:
            SearchDone: no step is left.
        """
        if self.level == self._items.steps:
            raise SearchDone(
                steps=self.level, remedy="All are chosen: take the results, or begin a new search."
            )
        if self._written is None or self._mask.writes != self._write_number:  # another search's
            self._written = self._mask.write(self.level, self._nodes)
            self._write_number = self._mask.writes
        return self._written

    def step(self, logits: torch.Tensor) -> Selection:
        """Choose the next token of all beams.

        Args:
            logits: [beams, vocabulary], floating-point, a row for each beam in the order of the
                last selection; -inf forbids a token.

        Returns:
            The beams kept. Reorder their pages next (`BeamPages.advance`). Among equal logits of a
            beam the order is that of `torch.topk`, which promises none.

        Raises:
            SearchDone: all tokens are chosen.
            ArgumentError: no tensor.
            WidthChanged, WrongShape, WrongDType: other logits than these.
            NoNumbers: NaN or +inf.
            NoValidItem: every token that leads to an item is forbidden.
        """
        self._check_kind(logits)
        mask = self.prepare()
        self._check(logits)
        masked = logits + mask  # float32 at least
        most = masked.amax(1)
        best = torch.log_softmax(masked, 1).topk(self._candidates, 1)
        host_most, values = most.double().cpu().numpy(), best.values.double().cpu().numpy()
        wrong = np.isnan(host_most) | (host_most == np.inf)
        if wrong.any():
            raise NoNumbers(beam=int(wrong.argmax()))
        values[host_most == -np.inf] = -np.inf  # of a beam that leads nowhere; softmax gave NaN
        totals = self._scores[:, None] + values
        top = sorted_top_k(totals, min(self.width, totals.size), assume_sorted=True)
        kept = int((top.scores > -np.inf).sum())
        if not kept:
            raise NoValidItem(reason=f"logits of step {self.level} forbid all tokens that lead on")
        parents, ranks = top.beams[:kept], top.ranks[:kept]
        tokens = best.indices.cpu().numpy()[parents, ranks]
        self._nodes = self._items.advance(self.level, self._nodes[parents], tokens)
        self._scores = top.scores[:kept].astype(np.float64)
        self.level, self._written = self.level + 1, None
        return Selection(parents, tokens, self._scores.copy(), top.seen, totals.size)

    def results(self) -> Recommended:
        """The items found.

        Raises:
            SearchDone: tokens are missing yet.
        """
        steps = self._items.steps
        if self.level < steps:
            remedy = f"Chosen are {self.level} yet; call step for the others."
            raise SearchDone(steps=steps, remedy=remedy)
        numbers, tokens = self._items.items(self._nodes)
        return Recommended(numbers, tokens, self._scores.copy())

    @staticmethod
    def _check_kind(logits: object) -> None:
        if not isinstance(logits, torch.Tensor):
            reason = f"are of type {type(logits).__name__}; expected a tensor (torch.as_tensor)"
            raise ArgumentError(name="logits", reason=reason)

    def _check(self, logits: torch.Tensor) -> None:
        if logits.ndim != 2 or logits.shape[1] != self._items.vocab_size:
            expected = (len(self), self._items.vocab_size)
            raise WrongShape(name="logits", got=tuple(logits.shape), expected=expected)
        if not logits.is_floating_point():
            raise WrongDType(name="logits", got=logits.dtype, expected="a floating-point type")
        if len(logits) != len(self):
            raise WidthChanged(name="logits", got=len(logits), expected=len(self))
