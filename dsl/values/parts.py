"""What a functor reads part by part, tensors and the position: nothing takes one as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from warploom.dsl.graphs import build
from warploom.dsl.values.refusals import NO_PRODUCTS, UNCHANGING
from warploom.errors import CannotTrace


class ReadInParts:
    """Base of what is no number itself; operators and functions on the whole of it are refused.

    Without this, Python would answer some of them by itself: `tensor == 3` would be False.
    """

    def described(self) -> str:
        """What it is, for messages."""
        raise NotImplementedError

    def remedy(self) -> str:
        """How to read one part of it."""
        raise NotImplementedError

    def refused(self, what: str) -> CannotTrace:
        """The error for `what`, at the user's line."""
        return build.refuse(f"{self.described()}: {what}", self.remedy())

    def __repr__(self) -> str:
        return f"<{self.described()}>"

    def _taken_whole(self, *_: object, **__: object) -> NoReturn:
        raise self.refused("computing with the whole of it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _taken_whole
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _taken_whole
    __pow__ = __rpow__ = _taken_whole
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _taken_whole
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _taken_whole
    __neg__ = __pos__ = __abs__ = __invert__ = __bool__ = _taken_whole
    __float__ = __int__ = __index__ = __iter__ = __array__ = __array_ufunc__ = _taken_whole
    __hash__ = object.__hash__

    def _no_product(self, other: object) -> NoReturn:
        raise build.refuse(f"{self.described()}: a product with it (@)", NO_PRODUCTS)

    __matmul__ = __rmatmul__ = _no_product

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        given = (*args, *(kwargs or {}).values())
        what = f"torch.{func.__name__} of the whole of it"
        for value in given:
            if isinstance(value, cls):
                raise value.refused(what)
        raise build.refuse(what, "Index it: a kernel reads one element of it.")  # it is in a list

    def _unchanging(self, *_: object) -> NoReturn:
        raise build.refuse(f"{self.described()}: assigning to it", UNCHANGING)

    __setitem__ = __delitem__ = _unchanging

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "item":  # what symbols and NumPy ask numbers for
            self._taken_whole()
        raise self.refused(f"its attribute .{name}")
