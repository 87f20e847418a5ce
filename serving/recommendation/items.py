"""The items that exist, as a tree over their tokens, and masks of the tokens that lead to one.

An item is a few tokens in order (three in OneRec); most combinations of tokens are no item. xLLM's
valid-item filtering (section 4.5) adds a mask to the logits, of a vocabulary made beforehand.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from warploom.errors import ArgumentError, IndexOutOfRange, WrongShape
from warploom.recommendation_errors import BadItems, NoValidItem, SearchDone, WidthChanged
from warploom.runtime.declaring.declare import checked_count
from warploom.runtime.tensors.tensors import host_array

Ints = npt.NDArray[np.int64]


class ItemTable:
    """Token sequences of all items as a tree, level by level, in as many numbers as it has nodes.

    A node of level d is a beginning of d tokens that some item has; level 0 has the root alone.
    Children of a node lie side by side, in the order of their tokens.

    Attributes:
        vocab_size: tokens of the model.
        steps: tokens of an item.
    """

    def __init__(self, items: Any, vocab_size: int) -> None:
        """Build the tree.

        Args:
            items: [items, steps] integers, the tokens of each; equal rows are one item.
            vocab_size: tokens of the model.

        Raises:
            BadItems: another shape or type, items of different lengths, or tokens outside of the
                vocabulary.
            NoValidItem: no items.
            ArgumentError: no vocabulary.
        """
        checked_count("vocab_size", vocab_size)
        given = _checked(_array(items), vocab_size)
        self.vocab_size, self.steps = vocab_size, given.shape[1]
        rows, first = np.unique(given, axis=0, return_index=True)
        self._rows: Ints = rows
        self._numbers: Ints = first.astype(np.int64)
        self._edges: list[Ints] = []  # node * vocabulary + token of each child; ascending
        self._begins: list[Ints] = []  # of each node's children, and the end of the last one's
        node = np.zeros(len(rows), np.int64)  # of each item, at the level
        for token in rows.T:
            edge = node * vocab_size + token
            opens = np.append(True, edge[1:] != edge[:-1])
            self._edges.append(edge[opens])
            nodes = np.arange(node[-1] + 2)
            self._begins.append(np.searchsorted(edge[opens], nodes * vocab_size))
            node = np.cumsum(opens) - 1

    def __len__(self) -> int:
        """Different items."""
        return len(self._rows)

    def children(self, level: int, nodes: Any) -> tuple[Ints, Ints]:
        """The tokens that lead on from these nodes.

        Args:
            level: of the nodes, from 0 to steps - 1.
            nodes: [beams] of that level.

        Returns:
            int64 (beam, token) of each child, in the order of the beams.

        Raises:
            SearchDone: a level without children.
            IndexOutOfRange: no such node.
        """
        nodes = self._nodes(level, nodes, self.steps - 1)
        begin, end = self._begins[level][nodes], self._begins[level][nodes + 1]
        count = end - begin
        beams = np.repeat(np.arange(len(nodes)), count)
        inside = np.arange(len(beams)) - np.repeat(np.cumsum(count) - count, count)
        return beams, self._edges[level][np.repeat(begin, count) + inside] % self.vocab_size

    def advance(self, level: int, nodes: Any, tokens: Any) -> Ints:
        """The nodes of the next level that these tokens lead to.

        Args:
            level: of the nodes, from 0 to steps - 1.
            nodes: [beams] of that level.
            tokens: [beams], one for each.

        Raises:
            SearchDone, IndexOutOfRange, WrongShape: see `children`; or another number of tokens.
            NoValidItem: a token that leads to no item.
        """
        nodes, tokens = (
            self._nodes(level, nodes, self.steps - 1),
            host_array(tokens, "tokens").astype(np.int64),
        )
        if tokens.shape != nodes.shape:
            raise WrongShape(name="tokens", got=tokens.shape, expected=nodes.shape)
        edge = nodes * self.vocab_size + tokens
        place: Ints = np.searchsorted(self._edges[level], edge)
        found = self._edges[level][np.minimum(place, len(self._edges[level]) - 1)]
        wrong = (found != edge) | (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            beam = int(wrong.argmax())
            reason = f"beam {beam} took token {tokens[beam]}, which leads to none"
            raise NoValidItem(reason=reason)
        return place

    def items(self, leaves: Any) -> tuple[Ints, Ints]:
        """Numbers of items, as rows of the table that was given, and their tokens [.., steps].

        Args:
            leaves: nodes of the last level.

        Raises:
            IndexOutOfRange: no such node.
        """
        leaves = self._nodes(self.steps, leaves, self.steps)
        return self._numbers[leaves], self._rows[leaves]

    def _nodes(self, level: int, given: Any, last: int) -> Ints:
        if not 0 <= level <= last:
            remedy = f"Level {level} has no such thing; levels 0 to {last} have."
            raise SearchDone(steps=self.steps, remedy=remedy)
        nodes = host_array(given, "nodes").astype(np.int64)
        if nodes.ndim != 1:
            raise WrongShape(name="nodes", got=nodes.shape, expected="(beams,)")
        size = 1 if level == 0 else len(self._edges[level - 1])
        wrong = (nodes < 0) | (nodes >= size)
        if wrong.any():
            at = int(wrong.argmax())
            raise IndexOutOfRange(name="nodes", index=at, value=nodes[at], last=size - 1)
        return nodes


class ItemMask:
    """A mask over logits that is written anew in as many places as there are valid tokens.

    Which tokens are valid, the host finds out: `write` may be called while the device computes the
    logits that the mask is for. The mask itself lies on the device: only places travel there.

    Attributes:
        items: whose tokens are let through.
        width: most beams.
        writes: how often it was written.
    """

    def __init__(
        self, items: ItemTable, width: int, device: torch.device | str | int = "cpu"
    ) -> None:
        """Take memory: float32 [width, vocabulary].

        Args:
            items: the table.
            width: most beams.
            device: of the logits.

        Raises:
            ArgumentError: no width.
        """
        checked_count("width", width)
        self.items, self.width, self.writes = items, width, 0
        self._mask = torch.full((width, items.vocab_size), -torch.inf, device=device)
        self._open: torch.Tensor | None = None  # places that are 0

    def write(self, level: int, nodes: Any) -> torch.Tensor:
        """The mask for beams at these nodes: 0 for tokens that lead to an item, -inf for others.

        Args:
            level: of the nodes.
            nodes: [beams], at most as many as the width.

        Returns:
            float32 [beams, vocabulary]; good until the next call.

        Raises:
            SearchDone, IndexOutOfRange, WrongShape: see `ItemTable.children`.
            WidthChanged: more beams than the mask has rows.
        """
        beams, tokens = self.items.children(level, nodes)
        count = len(nodes)
        if count > len(self._mask):
            raise WidthChanged(name="nodes", got=count, expected=f"at most {len(self._mask)}")
        places = torch.from_numpy(beams * self.items.vocab_size + tokens)
        places = places.to(self._mask.device, non_blocking=True)
        flat = self._mask.view(-1)
        if self._open is not None:
            flat.index_fill_(0, self._open, -torch.inf)
        flat.index_fill_(0, places, 0.0)
        self._open = places
        self.writes += 1
        return self._mask[:count]


def _array(items: Any) -> np.ndarray[Any, Any]:
    try:
        return host_array(items, "items")
    except ArgumentError as error:
        if not isinstance(items, (list, tuple)):
            raise
        lengths = [len(x) if isinstance(x, Sized) else 0 for x in items]
        at = next((i for i, length in enumerate(lengths) if length != lengths[0]), None)
        if at is None:
            raise
        counts = f"items[0] has {lengths[0]}, and items[{at}] has {lengths[at]}"
        raise BadItems(reason=f"have different numbers of tokens: {counts}") from error


def _checked(items: np.ndarray[Any, Any], vocab_size: int) -> Ints:
    if items.ndim != 2 or items.shape[1] == 0:
        raise BadItems(reason=f"have shape {items.shape}")
    if not np.issubdtype(items.dtype, np.integer):
        raise BadItems(reason=f"are of type {items.dtype}")
    if len(items) == 0:
        raise NoValidItem(reason="the table of items is empty")
    if items.min() < 0 or items.max() >= vocab_size:
        wrong = int(items.min()) if items.min() < 0 else int(items.max())
        raise BadItems(reason=f"hold token {wrong}, and the vocabulary has {vocab_size}")
    return items.astype(np.int64)
