"""Symbols: what a functor computes with while it is traced.

A symbol wraps one IR node and answers Python's operators, NumPy's and torch's functions. Whatever
would need its value (a branch, an index into a plain list, printing a number) raises an error at
the user's line.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.graphs.shown import shown
from warploom.dsl.types import location
from warploom.dsl.types.ir import Kind, Node, Source
from warploom.dsl.types.number_types import type_of_tensor
from warploom.dsl.values.foreign_names import numpy_name, torch_name
from warploom.dsl.values.refusals import (
    AS_TENSOR,
    CONCRETE,
    NAMED,
    NO_NEW,
    NO_PARTS,
    NO_PRODUCTS,
    UNCHANGING,
    concrete,
    forget_lengths,
    formatted,
    known,
    no_item,
    outside,
    refuse_in_place,
    remedy_for,
)
from warploom.errors import BranchOnSymbol, CannotTrace, WarploomError

Value: TypeAlias = Any  # a symbol, a NumPy array or a Python number, by the reading

# What to do with a torch tensor that is indexed by a symbol; `capture` sets it.
FOUND_TENSOR: ContextVar[Callable[[Any], Any] | None] = ContextVar("found_tensor", default=None)


class Symbol:
    """A value known only inside the kernel.

    Attributes:
        node: the expression.
        place: where in the user's code this symbol was made, or None.
    """

    __slots__ = ("node", "place")

    def __init__(self, node: Node, place: location.Location | None = None) -> None:
        self.node = node
        self.place = place

    @property
    def kind(self) -> Kind:
        return self.node.kind

    @property
    def source(self) -> Source | None:
        return location.source(self.place)

    def __repr__(self) -> str:
        return f"<{self.node.type} known only in the kernel: {shown(self.node)}>"

    # --- as torch sees it: a tensor of no dimensions

    shape = ()
    ndim = 0

    @property
    def dtype(self) -> Any:
        """torch's dtype, or NumPy's where there is no torch."""
        return foreign_dtype(self.node.type)

    @property
    def device(self) -> Any:
        """A device to make numbers on, which kernels then read."""
        torch = sys.modules.get("torch")
        return None if torch is None else torch.device("cpu")

    # --- arithmetic, logic and comparison

    def __add__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("add", self.node, as_node(other)))

    def __radd__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("add", as_node(other), self.node))

    def __sub__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("sub", self.node, as_node(other)))

    def __rsub__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("sub", as_node(other), self.node))

    def __mul__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("mul", self.node, as_node(other)))

    def __rmul__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("mul", as_node(other), self.node))

    def __truediv__(self, other: Value) -> Symbol:
        return wrap(build.true_divide(self.node, as_node(other)))

    def __rtruediv__(self, other: Value) -> Symbol:
        return wrap(build.true_divide(as_node(other), self.node))

    def __floordiv__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("floordiv", self.node, as_node(other)))

    def __rfloordiv__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("floordiv", as_node(other), self.node))

    def __mod__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("mod", self.node, as_node(other)))

    def __rmod__(self, other: Value) -> Symbol:
        return wrap(build.arithmetic("mod", as_node(other), self.node))

    def __pow__(self, other: Value) -> Symbol:
        return wrap(build.power(self.node, as_node(other)))

    def __rpow__(self, other: Value) -> Symbol:
        return wrap(build.power(as_node(other), self.node))

    def __and__(self, other: Value) -> Symbol:
        return wrap(build.logic("and", self.node, as_node(other)))

    def __rand__(self, other: Value) -> Symbol:
        return wrap(build.logic("and", as_node(other), self.node))

    def __or__(self, other: Value) -> Symbol:
        return wrap(build.logic("or", self.node, as_node(other)))

    def __ror__(self, other: Value) -> Symbol:
        return wrap(build.logic("or", as_node(other), self.node))

    def __xor__(self, other: Value) -> Symbol:
        return wrap(build.logic("xor", self.node, as_node(other)))

    def __rxor__(self, other: Value) -> Symbol:
        return wrap(build.logic("xor", as_node(other), self.node))

    def __divmod__(self, other: Value) -> tuple[Symbol, Symbol]:
        return self // other, self % other

    def __rdivmod__(self, other: Value) -> tuple[Symbol, Symbol]:
        return other // self, other % self

    def __lshift__(self, other: Value) -> Symbol:
        return wrap(build.shift("shl", self.node, as_node(other)))

    def __rlshift__(self, other: Value) -> Symbol:
        return wrap(build.shift("shl", as_node(other), self.node))

    def __rshift__(self, other: Value) -> Symbol:
        return wrap(build.shift("shr", self.node, as_node(other)))

    def __rrshift__(self, other: Value) -> Symbol:
        return wrap(build.shift("shr", as_node(other), self.node))

    def __lt__(self, other: Value) -> Symbol:
        return wrap(build.compare("lt", self.node, as_node(other)))

    def __le__(self, other: Value) -> Symbol:
        return wrap(build.compare("le", self.node, as_node(other)))

    def __gt__(self, other: Value) -> Symbol:
        return wrap(build.compare("gt", self.node, as_node(other)))

    def __ge__(self, other: Value) -> Symbol:
        return wrap(build.compare("ge", self.node, as_node(other)))

    def __eq__(self, other: Value) -> Symbol:  # type: ignore[override]
        return wrap(build.compare("eq", self.node, as_node(other)))

    def __ne__(self, other: Value) -> Symbol:  # type: ignore[override]
        return wrap(build.compare("ne", self.node, as_node(other)))

    def __neg__(self) -> Symbol:
        return wrap(build.negate(self.node))

    def __pos__(self) -> Symbol:
        return wrap(build.positive(self.node))

    def __abs__(self) -> Symbol:
        return wrap(build.absolute(self.node))

    def __invert__(self) -> Symbol:
        return wrap(build.invert(self.node))

    def __floor__(self) -> Symbol:
        return wrap(build.math_function("floor", self.node))

    def __ceil__(self) -> Symbol:
        return wrap(build.math_function("ceil", self.node))

    # --- what would need the value

    def __bool__(self) -> NoReturn:
        raise BranchOnSymbol(source=location.source(location.here()))

    def __hash__(self) -> int:
        raise build.refuse("hashing a value of the kernel (a dict key or set member)", CONCRETE)

    def _concrete(self, *args: object, **kwargs: object) -> NoReturn:
        raise concrete()

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = _concrete

    def __format__(self, spec: str) -> str:
        if spec:
            raise formatted()
        return repr(self)

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        remedy = outside(1) if FOUND_TENSOR.get() is None else AS_TENSOR
        raise build.refuse("a NumPy array indexed by, or built from, a value of the kernel", remedy)

    def _no_product(self, other: object) -> NoReturn:
        raise build.refuse("a product with a matrix (@)", NO_PRODUCTS)

    __matmul__ = __rmatmul__ = _no_product

    def _no_container(self, *args: object) -> NoReturn:
        raise build.refuse("indexing, iterating or unpacking a value of the kernel", NO_PARTS)

    __iter__ = __len__ = __contains__ = _no_container

    def __getitem__(self, index: object) -> Symbol:
        """`x[()]` and `x[...]`, as of tensors without dimensions."""
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        return self._no_container()

    def _unchanging(self, *args: object) -> NoReturn:
        raise build.refuse("assigning to a part of a value of the kernel", UNCHANGING)

    __setitem__ = __delitem__ = _unchanging

    # --- NumPy and torch

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        means = "eq" if name == "equal" else name  # torch.equal compares whole tensors
        return call_named("np." + name, means, args, kwargs)

    def __array_function__(
        self, func: Any, types: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return call_named(numpy_name(func), func.__name__, args, kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ == "__getitem__":
            return index_torch(*args)
        return call_named(torch_name(func), func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "item":  # what numbers of other libraries are told by
            raise no_item()
        refuse_in_place(f".{name}()", name, {})
        if name in NAMED:
            return lambda *args, **named: call_named(f".{name}()", name, (self, *args), named)
        raise build.refuse(f"the attribute .{name} of a value of the kernel", remedy_for(name))


def _yielding(method: Callable[[Symbol, Value], Symbol]) -> Callable[[Symbol, Value], Any]:
    """The operator where the other side is a value; rows of values know what to do themselves."""

    @functools.wraps(method)
    def operator(self: Symbol, other: Value) -> Any:
        return NotImplemented if getattr(type(other), "yields", False) else method(self, other)

    return operator


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(Symbol, f"__{_name}__", _yielding(getattr(Symbol, f"__{_name}__")))


def foreign_dtype(name: str) -> Any:
    """torch's dtype of a name, or NumPy's where torch has not been imported."""
    torch = sys.modules.get("torch")
    return np.dtype(name) if torch is None else getattr(torch, name)


def wrap(node: Node) -> Symbol:
    """A symbol for `node`, made at the user's current line."""
    return Symbol(node, location.here())


def as_node(value: Value) -> Node:
    """The node of a symbol, or of a Python, NumPy or torch number.

    Raises:
        CannotTrace: anything else, named by its type.
    """
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, (bool, int, float)):
        return build.constant(value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:
        number = as_node(item())
        # torch's own numbers have a type, which Python's take from what they meet
        is_typed = hasattr(value, "detach") and number.kind is Kind.INT
        return build.of_type(number, type_of_tensor(value)) if is_typed else number
    if item is not None:
        raise build.refuse(
            f"a plain {type(value).__module__}.{type(value).__name__} of shape "
            f"{tuple(value.shape)}",
            f"{outside(len(value.shape))} {NO_NEW}",
        )
    raise build.refuse(f"a value of type {type(value).__name__}", known())


def call_named(shown: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the function that a foreign library's name stands for."""
    refuse_in_place(shown, name, kwargs)
    function = NAMED.get(name.strip("_"))  # operators come as __and__
    if function is None:
        raise build.refuse(shown, remedy_for(name.strip("_")))
    # foreign numbers would hand the call straight back to us
    args = [_native(value) for value in args]
    try:
        return function(*args, **{key: _native(value) for key, value in kwargs.items()})
    except TypeError as error:
        raise build.refuse(f"{shown} with these arguments ({error})", known()) from error


def index_torch(tensor: Any, index: Any) -> Any:
    """`tensor[index]` where torch saw a symbol."""
    found = FOUND_TENSOR.get()
    if found is not None and not isinstance(tensor, Symbol):
        forget_lengths()
        return found(tensor)[index]
    shape = tuple(tensor.shape)
    raise build.refuse(f"indexing a plain torch tensor of shape {shape}", outside(len(shape)))


@contextmanager
def refusing_foreign() -> Iterator[None]:
    """Within the context, errors of libraries that met a symbol become CannotTrace."""
    try:
        yield
    except (WarploomError, RecursionError):
        raise
    except Exception as error:
        refused = _refuse_foreign(error)
        if refused is None:
            raise
        raise refused from error


def _refuse_foreign(error: Exception) -> CannotTrace | None:
    """What stands for the error of a library that met a symbol; None for the functor's own error.

    torch and NumPy raise from their own code, or from C and name the class that they were given.
    """
    names = ("Symbol", "SymbolicTensor", "CapturedTensor", "Position", "known only in the kernel")
    if not (location.is_of_library(error) or any(name in str(error) for name in names)):
        return None
    message = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    place = location.source(location.raising(error))
    what = f"what raised {type(error).__name__} ({message[:200]})"
    return CannotTrace(what=what, remedy=known(), source=place)


def _native(value: Any) -> Any:
    return wrap(as_node(value)) if hasattr(value, "item") else value
