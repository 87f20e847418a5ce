"""Ways around torch's dispatcher that torch's own compiler takes, each beside what it stands for.

A launch costs a few microseconds, and so would asking six tensors for their attributes, or
allocating through the dispatcher. These functions are not public in torch: where one is missing,
what it stands for does the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Same = Callable[..., bool]
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def like(*tensors: torch.Tensor, any_size: bool = False) -> Same:
    """A comparison: do tensors agree with these in all but addresses and values?

    It compares class, shape, strides, dtype, device and `requires_grad`. Neither these tensors nor
    those compared are kept alive.

    Args:
        tensors: what others are compared with.
        any_size: shapes may differ, but not their number of dimensions.
    """
    guard = getattr(_guards, "TensorGuards", None)
    if guard is None:
        return slow_like(*tensors, any_size=any_size)
    same: Same = guard(
        *tensors,
        dynamic_dims_sizes=[[None] * x.dim() if any_size else list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    ).check
    return same


def slow_like(*tensors: torch.Tensor, any_size: bool = False) -> Same:
    """`like` by public means."""
    wanted = [_facts(tensor, any_size) for tensor in tensors]

    def same(*others: torch.Tensor) -> bool:
        types = all(isinstance(other, torch.Tensor) for other in others)
        return types and [_facts(other, any_size) for other in others] == wanted

    return same


def _facts(tensor: torch.Tensor, any_size: bool) -> tuple[object, ...]:
    layout = tensor.stride(), tensor.dtype, tensor.device
    size = tensor.dim() if any_size else tensor.shape
    return type(tensor), size, *layout, tensor.requires_grad, tensor.is_neg()


def allocator(device: torch.device) -> Allocate:
    """`torch.empty_strided(shape, strides, dtype)` on a device, which must be the current one."""
    found: Allocate | None = getattr(_guards, f"_empty_strided_{device.type}", None)
    if found is not None:
        return found
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def _raw_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


# Handle of a device's current stream, without a stream object.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
# Index of the current device; CUDA must have been touched before.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
