"""A key of everything that Python functions may read, so that traces can be kept between calls.

Data is keyed by its contents, functions by their code and what they reach, classes by their
members, and modules by those members that some of this code names. Libraries, and tensors too large
to compare, are keyed by identity. If some part has no key that reflects its changes (an object of C
code, a large array, code that looks names up at run time, too many values), the whole value has no
key. Keys do not keep the user's objects alive.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Hashable, Iterator, Mapping, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

from warploom.dsl.values.stand_ins import has_memory, stands_in
from warploom.dsl.variants.capture import COPIES, Captures, writes
from warploom.dsl.variants.code_names import imports, names
from warploom.dsl.variants.fields import READING, VALUES
from warploom.dsl.variants.identity import number_of
from warploom.dsl.variants.purity import is_library

_MAX_BYTES = 1 << 16  # larger arrays are not compared
_MAX_VALUES = 4000  # above this, tracing again is cheaper
_MAX_DEPTH = 60
_OWN = "_warploom"  # prefix of attributes that warploom sets on a user's function
_PLAIN = (type(None), bool, int, str, bytes, complex, type(Ellipsis))
# Builtins that reach objects which the code does not name.
_BY_NAME = frozenset(("globals", "locals", "vars", "eval", "exec", "__import__", "import_module"))
# Types of C code whose objects never change.
_CONSTANT = {
    "builtins": {"builtin_function_or_method", "method_descriptor", "wrapper_descriptor", "code",
                 "classmethod_descriptor", "getset_descriptor", "member_descriptor",
                 "method-wrapper", "range", "slice", "object", "NotImplementedType"},
    "torch": {"dtype", "device", "layout", "memory_format", "finfo", "iinfo"},
    "numpy": {"ufunc"}, "decimal": {"Decimal"}, "re": {"Pattern"},
    "datetime": {"date", "datetime", "timedelta"},
}  # fmt: skip


def fingerprint(value: object) -> tuple[Hashable | None, list[object]]:
    """The key of a value, or None if it has none.

    Values of a variant's fields are not part of the key.

    Returns:
        The key, and objects that must stay alive as long as the key is kept, since it contains
        their ids: objects of C code that do not support weak references.
    """
    walk = _Walk()
    try:
        return walk.whole(value), walk.alive
    except _Unkeyed:
        return None, []


class _Unkeyed(Exception):
    pass


class _Walk:
    """Computes one key.

    Attributes:
        alive: objects whose ids are in the key.
    """

    def __init__(self) -> None:
        self.alive: list[object] = []
        self._seen: dict[int, int] = {}
        self._held: list[object] = []  # keeps alive the objects whose ids are in `_seen`
        self._visited = 0
        self._names: set[str] = set()  # names in all code that was visited
        self._modules: list[ModuleType] = []  # the user's modules
        self._inputs: set[int] = set()  # ids of captured tensors, whose values are in no graph

    def whole(self, value: object) -> Hashable:
        """The key of a value, and of the module members that its code names."""
        key, members, done = self.key(value, 0), list[Hashable](), set[tuple[int, str]]()
        while True:
            named = [
                (module, name)
                for module in self._modules
                for name in sorted(self._names & vars(module).keys())
                if (id(module), name) not in done
            ]
            if not named:
                break
            for module, name in named:
                done.add((id(module), name))
                members.append((name, self.key(vars(module)[name], 1)))
        if self._modules and "getattr" in self._names:
            raise _Unkeyed  # getattr of a module may use a name that is made at run time
        return key, tuple(members)

    def key(self, value: Any, depth: int) -> Hashable:
        self._visited += 1
        if self._visited > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Unkeyed
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, float):
            return type(value), repr(value)  # since 0.0 == -0.0 and nan != nan
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        array = self._array(value)
        if array is not None:
            return array
        if isinstance(value, ModuleType):
            if not _is_others(value.__name__):
                self._modules.append(value)
            return self._identity(value)
        if _of_library(value):
            return self._identity(value)
        parts = tuple(self.key(part, depth + 1) for part in self._parts(value))
        return self._identity(type(value)), parts

    def _identity(self, value: object) -> int | tuple[str, int]:
        """A value that is unique to this object as long as `alive` is kept."""
        number = number_of(value)
        if number is not None:
            return number
        self.alive.append(value)
        return "id", id(value)

    def _parts(self, value: Any) -> Iterator[object]:
        """The parts that a value consists of."""
        if isinstance(value, FunctionType):
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from (item for item in vars(value).items() if not item[0].startswith(_OWN))
            yield from self._read_by(value)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, property):
            yield value.fget
        elif isinstance(value, type):
            yield self._identity(value)
            yield from (base for base in value.__mro__[1:] if not _of_library(base))
            yield from _members(vars(value))
        else:
            yield from self._parts_of_data(value)

    def _read_by(self, function: FunctionType) -> Iterator[object]:
        """The objects that the names in a function's code refer to."""
        used, known = set(names(function.__code__)), function.__globals__
        if any(name not in known for name in _BY_NAME & used):
            raise _Unkeyed
        self._names |= used
        yield from ((name, known[name]) for name in sorted(used & known.keys()))
        for name in imports(function.__code__):
            if name not in sys.modules:  # the import has not run yet, or is relative
                raise _Unkeyed
            yield sys.modules[name]
            yield sys.modules[name.partition(".")[0]]
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # an empty cell: the name is not bound yet
                continue

    def _parts_of_data(self, value: Any) -> Iterator[object]:
        if type(value) in (tuple, list):  # the most frequent case, without attributes
            yield from value
            return
        items = isinstance(value, (Mapping, list, tuple, Set))
        if isinstance(value, Mapping):
            yield from value.items()
        elif items:
            yield from value
        left_out = {VALUES, READING}
        if isinstance(value, Captures):
            self._inputs |= {id(tensor) for tensor in value.tensors}
            left_out.add(COPIES)
        attributes = getattr(value, "__dict__", None)
        known = _slots(type(value))  # type: ignore[arg-type]  # classes are hashable
        slots = [name for name in known if hasattr(value, name)]
        if attributes is None and not slots and not items:
            yield from self._of_c_code(value)
        yield from ((name, getattr(value, name)) for name in slots)
        yield from (item for item in (attributes or {}).items() if item[0] not in left_out)
        if not items:
            yield type(value)  # its methods

    def _of_c_code(self, value: Any) -> Iterator[object]:
        """The parts of an object without attributes; raises _Unkeyed if it could change unseen."""
        kind = type(value)
        is_python = "__slots__" in vars(kind)
        if not is_python and kind.__name__ not in _CONSTANT.get(kind.__module__, ()):
            dtype = getattr(sys.modules.get("numpy"), "dtype", ())
            if not isinstance(value, dtype):
                raise _Unkeyed
        yield self._identity(value)
        owner = getattr(value, "__self__", None)  # the object of a bound C method
        if owner is not None and owner is not builtins:
            yield owner

    def _array(self, value: Any) -> Hashable | None:
        """A key of a tensor or an array; None for other values."""
        if stands_in(value) or getattr(value, "is_nested", False) is True:
            raise _Unkeyed  # some nested tensors have no size
        size = None if isinstance(value, type) else getattr(value, "nbytes", None)
        if not isinstance(size, int) or not hasattr(value, "dtype"):  # torch.ops has any attribute
            return None
        kind = self._identity(type(value)), tuple(value.shape), str(value.dtype)
        on_host = getattr(getattr(value, "device", None), "type", "cpu") in ("cpu", "c")
        if on_host and size <= _MAX_BYTES and not getattr(value.dtype, "hasobject", False):
            return *kind, _contents(value)
        count = writes(value)
        if count is None and id(value) not in self._inputs:
            raise _Unkeyed
        return *kind, self._identity(value), count


@functools.lru_cache(256)
def _slots(cls: type) -> tuple[str, ...]:
    named = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _members(namespace: Mapping[str, Any]) -> Iterator[object]:
    generated = ("__dict__", "__weakref__", "__doc__", "__annotations__", "_abc_impl")
    return (item for item in namespace.items() if item[0] not in generated)


def _is_others(module: str) -> bool:
    """Whether a module belongs to a library or to Python, and is assumed not to change."""
    return is_library(module) or module.partition(".")[0] in sys.stdlib_module_names


def _of_library(value: object) -> bool:
    return isinstance(value, (FunctionType, type)) and _is_others(value.__module__ or "")


def _contents(value: Any) -> bytes:
    if hasattr(value, "detach"):
        if not has_memory(value):
            raise _Unkeyed
        host = value.detach()
        # NumPy lacks bfloat16; a double holds any float
        value = (host.double() if host.is_floating_point() else host).numpy()
    contents: bytes = value.tobytes()
    return contents
