"""Views of captured tensors: other shapes of the same memory, which are captured, too.

A view is taken of the real tensor while a function is traced, so a kernel reads the same memory
with other strides, and sees later writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.stand_ins import has_memory, unwatched
from warploom.dsl.values.symbols import Value

_PROPERTIES = frozenset({"T", "mT"})
_METHODS = "view reshape transpose swapaxes movedim permute squeeze unsqueeze flatten ravel t"
VIEWS = _PROPERTIES | frozenset(_METHODS.split()) | {"expand", "narrow", "select"}


def is_of_view(index: Value) -> bool:
    """Whether an index makes a view instead of selecting an element: a slice, None or `...`."""
    return index is None or index is Ellipsis or isinstance(index, slice)


def view_named(shown: ReadInParts, tensor: Any, name: str, captured: Callable[[Any], Any]) -> Any:
    """The attribute `name`: a captured tensor, or a method that returns one."""
    if name in _PROPERTIES:
        return captured(_view(shown, tensor, f".{name}", lambda: getattr(tensor, name)))

    def method(*args: Any, **named: Any) -> Any:
        made = _view(shown, tensor, f".{name}()", lambda: getattr(tensor, name)(*args, **named))
        return captured(made)

    return method


def sliced(
    shown: ReadInParts, tensor: Any, skipped: int, index: tuple[Value, ...]
) -> tuple[Any, tuple[Value, ...]]:
    """`tensor[index]` as a view, with the axes that kernel values index right after the skipped.

    Args:
        shown: the proxy, for errors.
        tensor: the captured tensor.
        skipped: number of its first axes, which `index` does not cover.
        index: slices, None, `...`, ints and values of the kernel.

    Returns:
        The view, and the values that index those axes.
    """
    fixed: list[Any] = [slice(None)] * skipped
    axes = list(range(skipped))
    values: list[Value] = []
    axis, named = skipped, sum(one is not None and one is not Ellipsis for one in index)
    for one in index:
        if one is Ellipsis:
            axis += tensor.ndim - skipped - named
        elif one is None or isinstance(one, slice):
            axis += 1
        elif not isinstance(one, int):
            axes.append(axis)
            values.append(one)
            axis += 1
        is_fixed = is_of_view(one) or isinstance(one, int)
        fixed.append(one if is_fixed else slice(None))

    def take() -> Any:
        found = tensor[tuple(fixed)]
        rest = [i for i in range(found.ndim) if i not in axes]
        is_array = isinstance(found, np.ndarray)
        return (found.transpose if is_array else found.permute)((*axes, *rest))

    return _view(shown, tensor, "slicing it", take), tuple(values)


def _view(shown: ReadInParts, tensor: Any, what: str, take: Callable[[], Any]) -> Any:
    if hasattr(tensor, "data_ptr") and not has_memory(tensor):
        raise shown.refused(f"{what}, which stands for another tensor")
    try:
        with unwatched():
            found = take()
    except (IndexError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise shown.refused(f"{what} ({error})") from None
    if not _shares(found, tensor):
        raise shown.refused(f"{what}, which copies it")
    return found


def _shares(view: Any, tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        is_forward = min(getattr(view, "strides", ()), default=0) >= 0  # torch has no others
        return is_forward and np.may_share_memory(view, tensor)
    is_same = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return bool(is_same)
