"""FlashInfer's buffers for CUDA graphs, read for their sizes: bounds of all batches."""

from __future__ import annotations

from typing import Any

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.errors import ArgumentError, FrozenByGraph
from warploom.scheduler.model.bounds import Bounds


def check_sizes(**buffers: Any) -> list[int]:
    """Entries of each; raises ArgumentError for one that is missing."""
    for name, buffer in buffers.items():
        if not hasattr(buffer, "__len__"):
            reason = "is needed with use_cuda_graph=True: its size bounds the batches"
            raise ArgumentError(name=name, reason=reason)
    return [len(buffer) for buffer in buffers.values()]


def check_batch(**buffers: Any) -> tuple[int, int]:
    """(requests, pages) of an indptr, its last page lengths, and its pages, in this order.

    Raises:
        ArgumentError: one is missing, the first does not have one entry more than the second, or
            there is room for no request.
    """
    indptr, requests, pages = check_sizes(**buffers)
    if indptr != requests + 1:
        name, *others = buffers
        reason = f"has {indptr} entries; expected {requests + 1}, one more than {others[0]}"
        raise ArgumentError(name=name, reason=reason)
    check_room(requests, *buffers)
    return requests, pages


def check_room(requests: int, name: str, *_: str) -> None:
    """Raises ArgumentError for buffers without any room, of which the first one has the name."""
    if requests < 1:
        reason = "has room for no request; expected one entry more than there are requests"
        raise ArgumentError(name=name, reason=reason)


def bounds_of_buffers(room: tuple[int, int], requests: int, rows: int, page_size: int) -> Bounds:
    """Bounds of a paged batch.

    Args:
        room: requests and pages that the buffers hold.
        requests, rows: of the batch. The rows of the first one hold for all.
        page_size: tokens of a page.

    Raises:
        FrozenByGraph: the batch has another number of requests.
    """
    most, pages = room
    check_requests(requests, most)
    return Bounds(most, rows, min(pages * page_size, MAX_LENGTH), max_blocks=pages)


def check_requests(requests: int, expected: int) -> None:
    """Raises FrozenByGraph if a batch has another number of requests than the graph's buffers."""
    if requests != expected:
        remedy = "Pad the batch with requests that have no keys"
        raise FrozenByGraph(
            name="the number of requests", got=requests, expected=expected, remedy=remedy
        )
