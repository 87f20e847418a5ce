"""A key of everything that Python functions may read, so that traces can be kept between calls.

Data is keyed by its contents, functions by their code and what they reach, and classes by their
members; modules, tensors too large to compare, and the like by identity. What has no key that would
tell of a change (an object of C code, a large array, too much of it) makes the whole unkeyed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Iterator, Mapping, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

from warploom.dsl.values.stand_ins import has_memory, stands_in
from warploom.dsl.variants.capture import writes
from warploom.dsl.variants.fields import READING, VALUES
from warploom.dsl.variants.purity import is_library, reachable

_MAX_BYTES = 1 << 16  # larger arrays are not compared
_MAX_VALUES = 4000  # beyond, tracing anew is cheaper
_MAX_DEPTH = 60
_PLAIN = (type(None), bool, int, str, bytes, complex, type(Ellipsis))


def fingerprint(value: object) -> tuple[Hashable | None, list[object]]:
    """The key of a value, None if it has none.

    Values of a variant's fields are no part of it.

    Returns:
        The key, and the objects that whoever keeps the key must keep too, since it holds their ids.
    """
    walk = _Walk()
    try:
        return walk.key(value, 0), walk.alive
    except _Unkeyed:
        return None, []


class _Unkeyed(Exception):
    pass


class _Walk:
    def __init__(self) -> None:
        self.alive: list[object] = []
        self._seen: dict[int, int] = {}
        self._visited = 0

    def key(self, value: Any, depth: int) -> Hashable:
        self._visited += 1
        if self._visited > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Unkeyed
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, float):
            return type(value), repr(value)  # 0.0 equals -0.0, and nan not itself
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self.alive.append(value)
        array = _array_key(value)
        if array is not None:
            return array
        if isinstance(value, ModuleType) or _of_library(value):
            return id(value)
        return type(value), tuple(self.key(part, depth + 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[object]:
    """What a value consists of."""
    if isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from reachable(value)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, type):
        yield id(value)
        yield from (base for base in value.__mro__[1:] if not _of_library(base))
        yield from _members(vars(value))
    else:
        yield from _parts_of_data(value)


def _parts_of_data(value: Any) -> Iterator[object]:
    if type(value) in (tuple, list):  # most of all: no need to look for attributes
        yield from value
        return
    items = isinstance(value, (Mapping, list, tuple, Set))
    if isinstance(value, Mapping):
        yield from value.items()
    elif items:
        yield from value
    attributes = getattr(value, "__dict__", None)
    known = _slots(type(value))  # type: ignore[arg-type]  # classes are hashable
    slots = [name for name in known if hasattr(value, name)]
    if attributes is None and not slots and not items:
        if type(value).__hash__ is None:  # of C code, and may change
            raise _Unkeyed
        yield id(value)
    yield from ((name, getattr(value, name)) for name in slots)
    yield from (item for item in (attributes or {}).items() if item[0] not in (VALUES, READING))
    if not items:
        yield type(value)  # its methods


@functools.lru_cache(256)
def _slots(cls: type) -> tuple[str, ...]:
    named = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _members(namespace: Mapping[str, Any]) -> Iterator[object]:
    generated = ("__dict__", "__weakref__", "__doc__", "__annotations__", "_abc_impl")
    return (item for item in namespace.items() if item[0] not in generated)


def _of_library(value: object) -> bool:
    if not isinstance(value, (FunctionType, type)):
        return False
    module = value.__module__ or ""
    return is_library(module) or module.partition(".")[0] in sys.stdlib_module_names


def _array_key(value: Any) -> Hashable | None:
    """A key of a tensor or an array; None for other values."""
    if stands_in(value) or getattr(value, "is_nested", False) is True:
        raise _Unkeyed  # some of these have no size
    size = None if isinstance(value, type) else getattr(value, "nbytes", None)
    if not isinstance(size, int) or not hasattr(value, "dtype"):  # torch.ops has every attribute
        return None
    on_host = getattr(getattr(value, "device", None), "type", "cpu") in ("cpu", "c")
    if on_host and size <= _MAX_BYTES and not getattr(value.dtype, "hasobject", False):
        return type(value), tuple(value.shape), str(value.dtype), _contents(value)
    count = writes(value)
    if count is None:
        raise _Unkeyed
    return id(value), count


def _contents(value: Any) -> bytes:
    if hasattr(value, "detach"):
        if not has_memory(value):
            raise _Unkeyed
        host = value.detach()
        # NumPy lacks bfloat16; a double holds any float
        value = (host.double() if host.is_floating_point() else host).numpy()
    contents: bytes = value.tobytes()
    return contents
