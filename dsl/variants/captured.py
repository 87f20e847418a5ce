"""The proxy of a captured tensor: what a `score_mod` or `mask_mod` may do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types.ir import Kind
from warploom.dsl.values.from_end import from_end
from warploom.dsl.values.refusals import indices_of
from warploom.dsl.values.rows import Row, RowLike, row_of
from warploom.dsl.values.symbols import Symbol, Value
from warploom.dsl.variants.views import VIEWS, is_of_view, sliced, view_named

_NO_INDEX = {
    Kind.FLOAT: "Indices are ints: divide by // in place of /, or write x.int().",
    Kind.BOOL: "Indices are ints: write x.int(), or choose with torch.where(x, a, b).",
}


class CapturedTensor(RowLike):
    """The proxy of a captured tensor inside its function; it is indexed at once or step by step.

    Views of it, such as `table.T` and `table[1:]`, are captured tensors, too.
    """

    reread: Callable[[Any], Any] | None = None  # makes the proxy of a view

    def __init__(self, name: str, tensor: Any, load: Any, given: tuple[Value, ...] = ()) -> None:
        self._name = name
        self._tensor = tensor
        self._whole = tuple(tensor.shape)
        self._load = load
        self._given = given

    @property
    def shape(self) -> tuple[int, ...]:
        return self._whole[len(self._given) :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self._tensor.dtype

    @property
    def device(self) -> Any:
        return self._tensor.device

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> int | tuple[int, ...]:
        return self.shape if axis is None else self.shape[axis]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Value) -> Value:
        more = index if isinstance(index, tuple) else (index,)
        if any(map(is_of_view, more)):
            view, given = sliced(self, self._tensor, len(self._given), more)
            return self._reread(view)[self._given + given]
        if len(more) > self.ndim:
            raise self.refused(f"indexing it with {len(more)} of {self.ndim} indices")
        given = self._given + tuple(map(self._from_start, more, self.shape))
        if len(given) == len(self._whole):
            return self._load[given]
        part = CapturedTensor(self._name, self._tensor, self._load, given)
        part.reread = self.reread
        return part

    def _from_start(self, index: Value, size: int) -> Value:
        if isinstance(index, Symbol) and index.kind is not Kind.INT:
            what = f"{self.described()}: indexing it by {index.node.type}"
            raise build.refuse(what, _NO_INDEX[index.kind])
        if isinstance(index, (bool, np.bool_, float, str)):
            is_flag = isinstance(index, (bool, np.bool_))
            instead = f"one, as in {self._indexed}"
            if is_flag:
                instead = f"{int(index)} for an element, or None for an axis more"
            remedy = f"Indices are ints: write {instead}."
            raise build.refuse(f"{self.described()}: indexing it by {index!r}", remedy)
        return from_end(index, size)

    def __getattr__(self, name: str) -> Any:
        if name not in VIEWS or self._given:
            return super().__getattr__(name)
        return view_named(self, self._tensor, name, self._reread)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in VIEWS and args and isinstance(args[0], cls):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _reread(self, view: Any) -> Any:
        assert self.reread is not None
        return self.reread(view)

    def row(self, what: str) -> Row:
        if self.ndim != 1:
            raise self.refused("computing with the whole of it")
        return row_of(self, len(self), self._indexed)

    def described(self) -> str:
        return f"captured tensor {self._name!r} of shape {self.shape}"

    @property
    def _indexed(self) -> str:
        """How it may be indexed for one number, as an example."""
        return f"{self._name}[{indices_of(len(self._whole))}]"

    def remedy(self) -> str:
        return (
            f"Index it with one int per dimension, as in {self._indexed}; do other arithmetic on "
            "it before, outside."
        )
