"""Prefetches as operators of torch, which graphs can hold.

An operator without a result is removed from a graph unless it writes to something. So these say
that they write to `after`, which they do not touch: compilers then keep them, behind what makes
`after` and before what reads it. That is between the launch of a collective and its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from warploom.logs import log
from warploom.prefetch_errors import BudgetTooSmall, CannotPrefetch
from warploom.runtime.operators.custom_op import wrapper_of
from warploom.serving.prefetch.tensors import Pages, prefetch, side_stream


@contextmanager
def _stream(device: torch.device, aside: bool) -> Iterator[None]:
    """The side stream, behind what the current one has, if it is asked for and there is one."""
    if not aside or device.type != "cuda":
        yield
        return
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


@torch.library.custom_op("warploom::prefetch", mutates_args=("after",))
def prefetch_op(
    after: torch.Tensor,
    tensors: list[torch.Tensor],
    max_bytes: int,
    sms: int,
    aside: bool,
    keep: bool | None = None,
) -> None:
    """Bring tensors into L2.

    Args:
        after: what is made before and read behind; not touched.
        tensors, max_bytes, sms, keep: of `prefetch`.
        aside: on the side stream, until `warploom::join_prefetch`.
    """
    with _stream(tensors[0].device, aside):
        prefetch(tensors, max_bytes, sms=sms, keep=keep)


@torch.library.custom_op("warploom::prefetch_pages", mutates_args=("after",))
def prefetch_pages_op(
    after: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    handle: int,
    max_bytes: int,
    sms: int,
    aside: bool,
) -> None:
    """Bring pages that the wrapper with this handle will read into L2.

    Where the host does not know them, or a page is too large, there is nothing to bring, and the
    model runs as it did.

    Args:
        after, aside: of `prefetch_op`.
        k, v, max_bytes, sms: of `AttentionWrapper.prefetch`.
        handle: of the wrapper, as its run in the graph has it.
    """
    wrapper = cast(Pages, wrapper_of(handle))
    with _stream(k.device, aside):
        try:
            wrapper.prefetch((k, v), max_bytes, sms=sms)
        except (BudgetTooSmall, CannotPrefetch) as reason:
            log.debug("no pages are prefetched: %s", reason)


@torch.library.custom_op("warploom::join_prefetch", mutates_args=("after",))
def join_prefetch_op(after: torch.Tensor) -> None:
    """Let the current stream wait for the side stream, as a CUDA graph needs it."""
    if after.device.type == "cuda":
        torch.cuda.current_stream(after.device).wait_stream(side_stream(after.device))


@prefetch_op.register_fake
@prefetch_pages_op.register_fake
@join_prefetch_op.register_fake
def _(*args: object) -> None:
    """Nothing comes of it."""
