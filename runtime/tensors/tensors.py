"""Any framework's array as a torch tensor, without a copy; host arrays of indices as NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from warploom.error_base import kind_of
from warploom.errors import ArgumentError, WarploomError, WrongDType, WrongShape
from warploom.runtime.tensors.plain import refuse_freed, refuse_stand_in

_INT32 = np.iinfo(np.int32)
_OF_BLOCK_TABLES = (  # in which each request has as many columns
    " Of a block table [requests, columns] take each request's pages, one request behind the "
    "other: table[torch.arange(table.shape[1]) < pages[:, None]], where pages counts them."
)
_EMPTY = (np.float32, np.float64)  # torch's and NumPy's type of [], which has no integers


def as_torch(value: Any, name: str, shared: bool = False) -> torch.Tensor:
    """View `value` as a torch tensor that shares its memory.

    Args:
        value: a torch tensor, or any object with `__dlpack__` (CuPy, JAX, NumPy, ...). The producer
            orders its work before torch's current stream, as the DLPack protocol asks.
        name: the argument's name, for messages.
        shared: the tensor is written to, or read again later: what would be copied is refused.

    Raises:
        ArgumentError: the object exports no tensor, one that torch cannot view, or one that cannot
            be shared.
    """
    if isinstance(value, torch.Tensor):
        return _plain(value, name, shared)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        if shared:
            reason = "is a read-only array, which torch cannot share; give one that can be written"
            raise ArgumentError(name=name, reason=reason)
        value = value.copy()  # DLPack has no read-only tensors before version 1
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:
        if shared:
            raise ArgumentError(name=name, reason="runs backwards; torch has no negative strides")
        value = value.copy()  # torch ends the process when it imports one
    if value is None:
        raise ArgumentError(name=name, reason="is None; expected a tensor")
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        remedy = "convert it with .astype(array.dtype.newbyteorder('='))"
        raise ArgumentError(name=name, reason=f"has bytes in another order than torch's; {remedy}")
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(
            name=name,
            reason=f"{kind_of(value)} is neither a torch tensor nor has __dlpack__; "
            "give a tensor, such as torch.tensor([...])",
        )
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except WarploomError:  # it called warploom, which refused that
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(name=name, reason=f"its DLPack export failed ({error})") from error


def _plain(tensor: torch.Tensor, name: str, shared: bool) -> torch.Tensor:
    """The tensor, if its memory holds its values in rows; a lazy negative is worked out."""
    refuse_no_rows(tensor, name)
    refuse_stand_in(tensor, name)
    if tensor._is_zerotensor():
        if shared:
            raise ArgumentError(name=name, reason="is a lazy zero; give one with its own values")
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not tensor.is_neg():
        return tensor
    if shared:
        raise ArgumentError(name=name, reason="is a negative view; give one with its own values")
    return tensor.resolve_neg()


def refuse_no_rows(tensor: torch.Tensor, name: str) -> None:
    """Raise ArgumentError for nested and sparse tensors."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested" if tensor.is_nested else "a sparse"
        remedy = "pad it or give it as ragged rows" if tensor.is_nested else "use .to_dense()"
        raise ArgumentError(name=name, reason=f"is {kind} tensor; {remedy}")


def as_seen(value: Any, name: str) -> torch.Tensor:
    """What an operator is given for `value`, which may be a tensor that stands for another one."""
    if isinstance(value, torch.Tensor):
        refuse_no_rows(value, name)
        return value
    return as_torch(value, name)


def host_array(value: Any, name: str) -> np.ndarray:
    """Bring an array to the host as NumPy; a device array is copied, which waits for its stream.

    Raises:
        ArgumentError: no list, array or tensor, or lists in a list of different lengths.
    """
    if isinstance(value, torch.Tensor):
        refuse_no_rows(value, name)
        refuse_stand_in(value, name)
        tensor = value.detach()
        if tensor.is_meta:
            raise ArgumentError(name=name, reason="is a meta tensor, which has no values")
        refuse_freed(tensor, name, byte_span(tensor))
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return tensor.cpu().numpy()
    if isinstance(value, (np.ndarray, list, tuple, range, int, float, np.generic)):
        try:
            return np.asarray(value)
        except ValueError as error:  # rows of different lengths
            reason = "has lists of different lengths in it; give one flat list"
            raise ArgumentError(name=name, reason=reason) from error
    if not hasattr(value, "__dlpack__"):
        got = "None" if value is None else kind_of(value)
        raise ArgumentError(name=name, reason=f"is {got}; expected a list, an array or a tensor")
    return host_array(as_torch(value, name), name)


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, those between strides included."""
    if tensor.numel() == 0:
        return 0
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sized)
    return (last + 1) * tensor.element_size()


def host_int32(value: Any, name: str) -> np.ndarray:
    """Bring a one-dimensional array of indices to the host as contiguous int32.

    Args:
        value: list, NumPy array, torch tensor or DLPack producer with an integer type; int64 is
            accepted if every value fits, and floats if there are none.
        name: the argument's name, for messages.

    Raises:
        WrongDType: not an integer type.
        WrongShape: not one-dimensional.
        ArgumentError: a value does not fit into int32.
    """
    array = host_array(value, name)
    if array.size == 0 and array.dtype in _EMPTY:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise WrongDType(
            name=name,
            got=str(array.dtype),
            expected="int32",
            remedy="Lengths and indices are integers: convert them.",
        )
    if array.ndim != 1:
        remedy = _OF_BLOCK_TABLES if name == "kv_indices" and array.ndim == 2 else ""
        raise WrongShape(name=name, got=tuple(array.shape), expected="one dimension", remedy=remedy)
    if array.dtype != np.int32:
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            at = int(((array < _INT32.min) | (array > _INT32.max)).argmax())
            held = f"int32, which holds {_INT32.min} to {_INT32.max}"
            reason = f"its value {array[at]} at [{at}] does not fit into {held}"
            raise ArgumentError(name=name, reason=reason)
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)
