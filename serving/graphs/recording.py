"""Calls of torch's operators, recorded once and made again on the same tensors.

What a CUDA graph is on a device: Python is not asked again, results appear where they appeared
first, and everything else is read where it lay. Tensors that are not made by the recorded calls are
remembered by their memory alone, and nothing keeps that alive, as no graph does: a replay finds out
that it is gone. Calls of warploom's kernels are operators, too, and read their plan when they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from warploom.graph_errors import CaptureGone, DataDependent

_BY_MASK = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# methods that read a host tensor's memory without an operator: a device would have to be waited for
_READING = ("tolist", "numpy", "__array__", "__dlpack__")


@dataclass(frozen=True)
class Outside:
    """A tensor that was there before: where and how it lay."""

    memory: StorageWeakRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Outside:
        return Outside(
            StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def tensor(self) -> torch.Tensor | None:
        """A tensor like it, or None if its memory was given back."""
        if self.memory.expired():  # type: ignore[no-untyped-call]
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class Call:
    """One operator, its arguments as leaves of a tree, and those of its results that are new."""

    function: Any
    leaves: Sequence[object]
    tree: Any
    made: Mapping[int, torch.Tensor]  # by their place among the results

    def again(self, what: str) -> None:
        """Make the call; raises CaptureGone and DataDependent."""
        leaves = [
            self._found(one, what) if isinstance(one, Outside) else one for one in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.tree)
        results = tree_flatten(self.function(*args, **kwargs))[0]
        for place, target in self.made.items():
            result = results[place]
            if result.shape != target.shape:
                reason = f"{self.function} gave {tuple(result.shape)}, and {tuple(target.shape)} "
                raise DataDependent(what=what, reason=reason + "when it was captured")
            target.copy_(result)

    def _found(self, outside: Outside, what: str) -> torch.Tensor:
        tensor = outside.tensor()
        if tensor is None:
            reason = f"{self.function} read {list(outside.shape)} {outside.dtype}, since given back"
            remedy = (
                "Hold what the step reads for as long as the pool, give what changes from batch to "
                "batch as an input, and make constants before, not within the step."
            )
            raise CaptureGone(what=what, reason=reason, remedy=remedy)
        return tensor


class ReadingRefused(TorchFunctionMode):
    """Refuses, while it is entered, what reads values without an operator."""

    def __init__(self, what: str) -> None:
        """In a capture of `what`, for messages."""
        super().__init__()
        self._what = what

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _READING and getattr(torch.Tensor, name, None) is func:
            raise DataDependent(what=self._what, reason=f"Tensor.{name}() reads values")
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls that are made while it is entered.

    Attributes:
        calls: in their order.
    """

    def __init__(self, what: str) -> None:
        """Of `what`, for messages."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self.calls: list[Call] = []
        self._made: dict[int, torch.Tensor] = {}  # by the number of their memory

    @property
    def made(self) -> Iterable[torch.Tensor]:
        """Results of the calls, which are their own."""
        return self._made.values()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        with self:  # in inference mode operators come whole that are others in turn
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        leaves, tree = tree_flatten((args, kwargs))
        self._refuse_dependence(func, leaves)
        result = func(*args, **kwargs)
        read = {_memory(one) for one in leaves if isinstance(one, torch.Tensor)}
        made = {
            place: one
            for place, one in enumerate(tree_flatten(result)[0])
            if isinstance(one, torch.Tensor) and _memory(one) not in read
        }
        if made or func._schema.is_mutable:  # else it is a view, of which kernels know nothing
            kept = [self._kept(one) for one in leaves]
            self.calls.append(Call(func, kept, tree, made))
        self._made |= {_memory(one): one for one in made.values()}
        return result

    def replay(self) -> None:
        """Make all calls again; raises CaptureGone and DataDependent."""
        with torch.no_grad():
            for call in self.calls:
                call.again(self._what)

    def spoil(self) -> None:
        """Write nonsense where results lay, as captures that share the memory would."""
        with torch.no_grad():
            for tensor in self.made:
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(torch.nan)
                else:
                    tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    def _kept(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or _memory(leaf) in self._made:
            return leaf
        return Outside.of(leaf)

    def _refuse_dependence(self, func: Any, leaves: Sequence[object]) -> None:
        name = func._schema.name
        if name in _BY_MASK:
            masks = (torch.bool, torch.uint8)
            indices = [one for one in leaves[1:] if isinstance(one, torch.Tensor)]
            depends = any(one.dtype in masks for one in indices[: len(indices) - ("put" in name)])
        else:
            depends = bool(
                {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
            )
        if depends:
            reason = f"{func} needs values before it can tell what it gives"
            raise DataDependent(what=self._what, reason=reason)


def _memory(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)
