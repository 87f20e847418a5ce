"""Which strides and addresses kernels take, and copies of the tensors that have others.

Kernels read vectors along the head dimension, GPUs 16 bytes at a time from addresses that divide by
16, and the copy engine of Hopper steps through no axis of stride 0. torch knows no such limits, so
what has other strides is copied, and the user is told once for each place in the code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.counters import count
from warploom.errors import ArgumentError
from warploom.logs import log
from warploom.notices import CopyWarning, warn_once

# Bytes of a paged cache of keys or of values that a run still copies. A larger one takes longer to
# copy than most runs take, at each step of a generation, and may not fit into memory twice.
LARGEST_CACHE_COPIED = 64 << 20
_ENGINE_LIMIT = 1 << 40  # bytes of a stride, of the copy engine


@dataclass(frozen=True)
class Obstacle:
    """Why a kernel cannot reach a tensor where it lies, and what its owner can do about it."""

    reason: str
    remedy: str


def obstacle(tensor: torch.Tensor, vector: int, by_engine: bool = False) -> Obstacle | None:
    """What keeps a kernel from a tensor, if anything does.

    Args:
        tensor: any; its last axis is that of vectors.
        vector: bytes of which addresses must be multiples; 1 on the CPU.
        by_engine: Hopper's copy engine reads it.
    """
    if tensor.numel() == 0:
        return None
    strides, size = tensor.stride(), tensor.element_size()
    if strides[-1] != 1:
        reason = f"its last stride is {strides[-1]}, and kernels read the head dimension as one run"
        return Obstacle(reason, "lay it out with .contiguous()")
    sized = zip(strides[:-1], tensor.shape[:-1], strict=True)
    steps = [size * stride for stride, length in sized if length > 1]
    if any(step % vector for step in steps):
        reason = f"of its strides {strides} one is no multiple of {vector // size} elements"
        return Obstacle(reason, "lay it out with .contiguous(), or pad its rows")
    if by_engine and 0 in steps:
        reason = f"it is expanded (its strides are {strides}), which tensor copies cannot follow"
        remedy = "declare as many heads as there are, or kv_format=Dense(shared=True) for one batch"
        return Obstacle(reason, remedy)
    if by_engine and max(steps, default=0) >= _ENGINE_LIMIT:
        return Obstacle(f"one of its strides {strides} is too large for tensor copies",
                        "lay it out with .contiguous()")  # fmt: skip
    if tensor.data_ptr() % vector:
        reason = f"its address is no multiple of {vector} bytes"
        return Obstacle(reason, "let it begin at such an address, or give a .clone() of it")
    return None


def result_strides(q: torch.Tensor, head_dim: int) -> tuple[int, ...]:
    """Strides of a result [..., head_dim] whose axes lie in memory as q's do.

    They are those of `torch.empty_like(q)`, so that whoever has transposed q can transpose the
    result back without a copy; of one whose lanes do not lie side by side it is contiguous.
    """
    lanes = q.shape[-1]
    if type(q) is torch.Tensor and q.is_contiguous() and lanes == head_dim:
        return q.stride()  # the usual case, without a tensor
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_like(q, device="meta")
        if made.stride(-1) != 1:
            made = q.new_empty(q.shape, device="meta")
    if lanes == head_dim:
        return made.stride()
    return (*(stride // max(lanes, 1) * head_dim for stride in made.stride()[:-1]), 1)


def new_result(q: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Memory for a result of q's type, with these strides."""
    with torch._C.DisableTorchFunctionSubclass():
        return q.new_empty_strided((*q.shape[:-1], head_dim), result_strides(q, head_dim))


def reachable(
    tensor: torch.Tensor, name: str, found: Obstacle, is_cache: bool = False
) -> torch.Tensor:
    """A copy without obstacles, made on the current stream, also while a CUDA graph is captured.

    Raises:
        ArgumentError: a cache that is too large to be copied by every run.
    """
    if is_cache:
        _refuse_large(tensor, name, found)
    tell(name, found)
    log.debug("copying %s of shape %s: %s", name, tuple(tensor.shape), found.reason)
    return tensor.clone(memory_format=torch.contiguous_format)


def room_for(tensor: torch.Tensor, name: str, found: Obstacle) -> torch.Tensor:
    """Memory without obstacles for a result that is copied to the tensor afterwards."""
    tell(name, found)
    log.debug("computing %s elsewhere, to copy it there: %s", name, found.reason)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _refuse_large(tensor: torch.Tensor, name: str, found: Obstacle) -> None:
    held = tensor.numel() * tensor.element_size()
    if held <= LARGEST_CACHE_COPIED:
        return
    reason = (
        f"{found.reason}; a cache of {held >> 20} MiB is not copied by every run "
        f"({LARGEST_CACHE_COPIED >> 20} MiB are). Where it is made, once, {found.remedy}"
    )
    raise ArgumentError(name=name, reason=reason)


def tell(name: str, found: Obstacle) -> None:
    """Count a copy, and warn of it once for each place in the user's code."""
    count("copies")
    text = f"{name} is copied at each call from here: {found.reason}. To save that, {found.remedy}."
    warn_once(name, text, CopyWarning)
