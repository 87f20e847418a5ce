"""Short rows of captured tensors: what is computed with them element by element, and their sums.

`(q_extra[b, h, q_idx] * k_extra[b, kv_idx]).sum(-1)` is a product of two rows of a size that is
known while functions are traced. It is unrolled: each element is a value of its own, which costs
registers. Longer products belong into q and k, whose heads may be any multiple of 8 lanes.

A value with an axis more, `kv_tile.unsqueeze(-1)`, is a row of one element, which meets each of
another row: `(tiles[b, h, q_tile] == kv_tile.unsqueeze(-1)).any(-1)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.types.number_types import SMALL
from warploom.dsl.values.conversions import type_of
from warploom.dsl.values.functions import to_bool, to_int
from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.refusals import NAMED
from warploom.dsl.values.symbols import Value, call_named

LONGEST = 64  # elements; each is loaded by each thread that needs it
_LONG = (
    f"Rows of up to {LONGEST} elements are unrolled; longer ones are lanes of q and k: give "
    "attention torch.cat((q, q_extra), -1) and torch.cat((k, k_extra), -1), and sm_scale."
)


class RowLike(ReadInParts):
    """What may be a row: its operators and torch's functions work element by element."""

    yields: ClassVar[bool] = True  # symbols leave operators with it to it

    def row(self, what: str) -> Row:
        """Its elements; raises CannotTrace where it is no row."""
        raise NotImplementedError

    def sum(self, dim: int | None = -1, **options: Any) -> Value:
        return self.row("a sum").total("sum", dim, options)

    def mean(self, dim: int | None = -1, **options: Any) -> Value:
        row = self.row("a mean")
        return row.total("mean", dim, options) / len(row.values)

    def all(self, dim: int | None = -1) -> Value:
        return reduce(operator.and_, map(to_bool, self.row("all").checked("all", dim).values))

    def any(self, dim: int | None = -1) -> Value:
        return reduce(operator.or_, map(to_bool, self.row("any").checked("any", dim).values))

    def __matmul__(self, other: Any) -> Value:
        products = _each(operator.mul, "a product (@)", self, other).values
        return reduce(operator.add, products)

    def __rmatmul__(self, other: Any) -> Value:
        return self @ other

    dot = inner = matmul = __matmul__

    def __array_ufunc__(  # type: ignore[override]
        self, ufunc: Any, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        if method != "__call__" or kwargs:
            raise self.refused(f"np.{ufunc.__name__}.{method}")
        return _each(ufunc, f"np.{ufunc.__name__}", *args)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__.strip("_")
        whole = {"linalg_vecdot": "dot", "vdot": "dot"}.get(name, name)
        if whole in _WHOLE and args and isinstance(args[0], RowLike):
            return getattr(args[0], whole)(*args[1:], **(kwargs or {}))
        return _named(name, f"torch.{name}", args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in NAMED:
            return lambda *args, **named: _named(name, f".{name}()", (self, *args), named)
        return super().__getattr__(name)


_WHOLE = frozenset({"sum", "mean", "all", "any", "dot", "inner", "matmul"})


class Row(RowLike):
    """Elements, each a value.

    Attributes:
        of: the captured tensors that they were read of, as they are indexed: "bias[kv_idx]".
    """

    def __init__(self, values: Sequence[Value], of: str = "") -> None:
        self.values = list(values)
        self.of = of

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def row(self, what: str) -> Row:
        return self

    def __getitem__(self, index: Any) -> Value:
        if not isinstance(index, int):
            remedy = f"Index {self.of or 'tensors'} first, and compute then"
            what = f"{self.described()}: indexing it by a value of the kernel"
            raise build.refuse(what, f"{remedy}; or compute the row before, outside.")
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def checked(self, what: str, dim: int | None, options: Mapping[str, Any] = {}) -> Row:
        if dim not in (None, 0, -1) or any(options.values()):
            raise self.refused(f"{what} of it with dim={dim}, {dict(options)}")
        return self

    def total(self, what: str, dim: int | None, options: Mapping[str, Any]) -> Value:
        """The sum; of small ints and truths it is an int, as in torch."""
        values = self.checked(what, dim, options).values
        small = (*SMALL, "bool")
        return reduce(operator.add, (to_int(x) if type_of(x) in small else x for x in values))

    def described(self) -> str:
        made = ", computed of a captured tensor without an index" if self.of else ""
        return f"a row of {len(self.values)} numbers{made}"

    def remedy(self) -> str:
        index = f"Index the tensor for one number: {self.of}. " if self.of else ""
        return f"{index}Sum a row with .sum(-1), or multiply it with another row by @."


def _each(function: Callable[..., Value], what: str, *args: Any) -> Row:
    """A function of rows and numbers, element by element."""
    given = [arg.row(what) if isinstance(arg, RowLike) else arg for arg in args]
    rows = [arg for arg in given if isinstance(arg, Row)]
    of = ", ".join(dict.fromkeys(row.of for row in rows if row.of))
    sizes = {len(row.values) for row in rows}
    size = max(sizes)
    if sizes - {1, size}:
        raise rows[0].refused(f"{what} with a row of another length, {max(sizes - {size})}")
    return Row([function(*(_at(arg, i) for arg in given)) for i in range(size)], of)


def _at(arg: Any, i: int) -> Any:
    if not isinstance(arg, Row):
        return arg
    return arg.values[i if len(arg.values) > 1 else 0]


def _row_of_one(value: Value, dim: int) -> Row:
    if dim not in (0, -1):
        raise build.refuse(f"unsqueeze({dim}) of a value", "It has no axes: give 0 or -1.")
    return Row([value])


NAMED["unsqueeze"] = _row_of_one


def _named(name: str, shown: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Row:
    if name == "unsqueeze":
        raise build.refuse(f"{shown} of a row", "A row has one axis.")
    if any(isinstance(value, RowLike) for value in kwargs.values()):
        raise build.refuse(f"{shown} with a row by name", "Give it in its place.")
    return _each(lambda *values: _called(name, shown, values, kwargs), shown, *args)


def _called(name: str, shown: str, values: Sequence[Value], kwargs: Mapping[str, Any]) -> Value:
    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays or name not in NAMED:
        return call_named(shown, name, values, kwargs)
    return arrays[0]._keep(NAMED[name](*values, **kwargs))


def _operator(name: str) -> Callable[..., Row]:
    function = getattr(operator, f"__{name}__")
    return lambda self, other: _each(function, f"{name} with it", self, other)


def _reflected(name: str) -> Callable[..., Row]:
    function = getattr(operator, f"__{name}__")
    return lambda self, other: _each(lambda a, b: function(b, a), f"{name} with it", self, other)


def _alone(name: str) -> Callable[..., Row]:
    function = getattr(operator, f"__{name}__")
    return lambda self: _each(function, f"{name} of it", self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(RowLike, f"__{_name}__", _operator(_name))
    setattr(RowLike, f"__r{_name}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(RowLike, f"__{_name}__", _operator(_name))
for _name in ("neg", "abs", "invert"):
    setattr(RowLike, f"__{_name}__", _alone(_name))


def row_of(tensor: Any, size: int, of: str) -> Row:
    """The elements of something that is indexed; raises CannotTrace where they are too many.

    Args:
        tensor: a captured tensor of one dimension.
        size: its length.
        of: how it is indexed for one number.
    """
    if size > LONGEST:
        what = f"{tensor.described()}: computing with the whole of it"
        raise build.refuse(what, f"Index it for one number: {of}. {_LONG}")
    return Row([tensor[i] for i in range(size)], of)
