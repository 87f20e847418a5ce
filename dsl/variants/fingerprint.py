"""A key of everything that Python functions may read, so that traces can be kept between calls.

Data is keyed by its contents, functions by their code and what they reach, classes by their
members, and modules by those members that some of this code names. Libraries, and tensors too large
to compare, are keyed by identity. If some part has no key that reflects its changes (an object of C
code, a large array, code that looks names up at run time, too many values), the whole value has no
key. Keys do not keep the user's objects alive. Decision 0063.
"""

from __future__ import annotations

import builtins
import collections
import functools
import sys
from collections.abc import Hashable, Iterator, Mapping, Set
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from warploom.dsl.values.stand_ins import has_memory, stands_in
from warploom.dsl.variants.capture import CAPTURES, FUNCTIONS, Captures, is_tensor, writes
from warploom.dsl.variants.code_names import closed_over, global_names, imports, names
from warploom.dsl.variants.fields import READING, VALUES
from warploom.dsl.variants.identity import number_of
from warploom.dsl.variants.purity import is_library

_MAX_BYTES = 1 << 16  # larger arrays are not compared
_MAX_VALUES = 4000  # above this, tracing again is cheaper
_MAX_DEPTH = 60
_OWN = "_warploom"  # prefix of attributes that warploom sets on a user's function
_NUMBERS = (int, str, bytes, complex, float)
_PLAIN = {type(None), bool, int, str, bytes, complex, type(Ellipsis)}
# Names by which code reaches objects that it does not name.
_BY_NAME = {"globals", "locals", "vars", "eval", "exec", "__import__"}
_BY_CALL = {"import_module", "getenv", "getcontext", "get_default_dtype", "get_default_device"}
# Names by which code reaches members of a module that it does not name.
_OF_MODULE = {"getattr", "hasattr", "attrgetter", "__dict__"}
# Types of C code whose objects never change.
_CONSTANT = {
    "builtins": {"builtin_function_or_method", "method_descriptor", "wrapper_descriptor", "code",
                 "classmethod_descriptor", "getset_descriptor", "member_descriptor",
                 "method-wrapper", "range", "slice", "object", "NotImplementedType"},
    "types": {"UnionType", "GenericAlias"}, "_collections": {"_tuplegetter"},
    "_thread": {"lock", "RLock"},  # these change no result
    "torch": {"dtype", "device", "layout", "memory_format", "finfo", "iinfo"},
    "numpy": {"ufunc"}, "decimal": {"Decimal"}, "re": {"Pattern"},
    "datetime": {"date", "datetime", "timedelta"},
}  # fmt: skip
# Types of C code, bases of users' classes among them, whose state `_parts_of_data` reads.
_READ = {
    object, tuple, list, dict, set, frozenset, *_NUMBERS, SimpleNamespace, type({}.keys()),
    type({}.items()), type(type.__dict__), collections.OrderedDict, collections.defaultdict,
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
    except Exception:  # an object that cannot be asked, by its own code, has no key
        return None, []


class _Unkeyed(Exception):
    pass


class _Walk:
    """Makes one key.

    Attributes:
        alive: objects whose ids the key contains.
    """

    def __init__(self) -> None:
        self.alive: list[object] = []
        self._seen: dict[tuple[int, bool], int] = {}
        self._held: list[object] = []  # keeps alive the objects whose ids `_seen` contains
        self._visited = 0
        self._names: set[str] = set()  # names in the code visited so far
        self._modules: list[ModuleType] = []  # modules of the user visited so far
        self._others: list[ModuleType] = []  # modules of Python visited so far
        # The captures of the Flex variant whose functions are visited: `rebuild` replaces the
        # tensors that they hold, whose values no graph has. None elsewhere.
        self._captures: Captures | None = None

    def whole(self, value: object) -> Hashable:
        """The key of a value, including the module members that its code names."""
        key, members, done = self.key(value, 0), list[Hashable](), set[tuple[int, str]]()
        while named := [found for found in self._named_members() if found[:2] not in done]:
            for module, name, member in named:
                done.add((module, name))
                members.append((name, self.key(member, 1)))
        if self._modules and self._names & _OF_MODULE:
            raise _Unkeyed
        return key, tuple(members)

    def _named_members(self) -> list[tuple[int, str, object]]:
        """Modules' ids, names and members; of Python's own modules those that are data."""
        found = []
        for module in (*self._modules, *self._others):
            space = vars(module)
            for name in sorted(self._names & space.keys()):
                is_code = isinstance(space[name], (ModuleType, type)) or callable(space[name])
                if module in self._modules or not is_code:
                    found.append((id(module), name, space[name]))
        return found

    def key(self, value: Any, depth: int) -> Hashable:
        self._visited += 1
        if self._visited > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Unkeyed
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, repr(value)  # distinguishes 0.0 and -0.0; makes nan equal to itself
        if self._captures is not None and is_tensor(value):
            return self._input(value, self._captures)
        place = id(value), self._captures is not None
        if place in self._seen:
            return "seen", self._seen[place]
        self._seen[place] = len(self._seen)
        self._held.append(value)
        array = self._array(value)
        if array is not None:
            return array
        if isinstance(value, ModuleType):
            return self._module(value)
        if _of_library(value):
            return self._identity(value)
        outer = self._captures
        if not (kind in (tuple, list) or isinstance(value, _FOLLOWED)):
            self._captures = None  # `rebuild` does not look into other objects
        parts = tuple(self.key(part, depth + 1) for part in self._parts(value))
        self._captures = outer
        return self._identity(kind), parts

    def _identity(self, value: object) -> int | tuple[str, int]:
        """A number that no other object has while `alive` is kept."""
        number = number_of(value)
        if number is not None:
            return number
        self.alive.append(value)
        return "id", id(value)

    def _input(self, tensor: Any, captures: Captures) -> Hashable:
        """A captured tensor by what a graph has of it: the name of its field, and its size."""
        name = None if stands_in(tensor) else captures.known_name(tensor)
        if name is None:  # the next trace names it; a tensor that stands in may have no size
            raise _Unkeyed
        return name, tuple(tensor.shape), str(tensor.dtype)

    def _module(self, module: ModuleType) -> Hashable:
        if _is_others(module.__name__):
            if not is_library(module.__name__):
                self._others.append(module)
        elif type(module) is ModuleType and "__getattr__" not in vars(module):
            self._modules.append(module)
        else:
            raise _Unkeyed  # its members are made when they are asked for
        return self._identity(module)

    def _parts(self, value: Any) -> Iterator[object]:
        """The objects that a value consists of."""
        if isinstance(value, FunctionType):
            yield from (value.__code__, value.__defaults__)
            own = {k: x for k, x in list(vars(value).items()) if not k.startswith(_OWN)}
            yield from (value.__kwdefaults__, own)  # dictionaries, in which no tensor is replaced
            yield from self._read_by(value)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args)
            yield from list(value.keywords.items())
        elif isinstance(value, (staticmethod, classmethod)):
            yield value.__func__
        elif isinstance(value, _CACHED):
            yield value.__wrapped__
        elif isinstance(value, property):
            yield value.fget
        elif isinstance(value, type):
            yield self._identity(value)
            yield from (base for base in value.__mro__[1:] if not _of_library(base))
            yield type(value)
            yield from _members(dict(vars(value)))
        else:
            yield from self._parts_of_data(value)

    def _read_by(self, function: FunctionType) -> Iterator[object]:
        """The objects that the names in a function's code refer to."""
        code, known = function.__code__, function.__globals__
        used, found = set(global_names(code)), set(names(code))
        if found & _BY_CALL or any(name not in known for name in _BY_NAME & used):
            raise _Unkeyed
        self._names |= found
        yield from ((name, known[name]) for name in sorted(used & known.keys()))
        for name in imports(code):
            if name not in sys.modules:  # a relative import, or not executed yet
                raise _Unkeyed
            yield sys.modules[name]
            yield sys.modules[name.partition(".")[0]]
        yield from closed_over(function)

    def _parts_of_data(self, value: Any) -> Iterator[object]:
        kind = type(value)
        if kind in (tuple, list):  # the most frequent case, which has no attributes
            yield from value
            return
        if any(not _is_read(base) for base in kind.__mro__):
            yield from self._of_c_code(value)
            return
        yield kind  # its methods
        said: list[Any] = [base.__repr__ for base in _NUMBERS if isinstance(value, base)]
        yield from (say(value) for say in said)
        if isinstance(value, collections.defaultdict):
            yield value.default_factory
        if isinstance(value, Mapping):
            yield from list(value.items())
        elif isinstance(value, (list, tuple, Set)):
            yield from list(value)
        yield from ((name, getattr(value, name)) for name in _slots(kind) if hasattr(value, name))
        attributes = dict(getattr(value, "__dict__", None) or {})
        captures = attributes.pop(CAPTURES, None)
        if isinstance(captures, Captures):
            yield tuple(captures.fields)
            self._captures = captures
            yield from (attributes.pop(FUNCTIONS).values())
            self._captures = None
        yield from (item for item in attributes.items() if item[0] not in (VALUES, READING))

    def _of_c_code(self, value: Any) -> Iterator[object]:
        """The parts of an object whose state only C code knows; raises if it may change."""
        kind = type(value)
        if kind.__name__ not in _CONSTANT.get(kind.__module__, ()):
            dtype = getattr(sys.modules.get("numpy"), "dtype", ())
            if not isinstance(value, dtype):
                raise _Unkeyed
        yield self._identity(value)
        owner = getattr(value, "__self__", None)  # set on functions and methods of C code
        if owner is not builtins:
            yield owner
        elif value.__name__ in _BY_NAME:
            raise _Unkeyed
        else:
            self._names.add(value.__name__)  # under whatever name the code has it

    def _array(self, value: Any) -> Hashable | None:
        """A key of a tensor or an array; None for other values."""
        if stands_in(value) or getattr(value, "is_nested", False) is True:
            raise _Unkeyed  # some of these have no size
        size = None if isinstance(value, type) else getattr(value, "nbytes", None)
        if not isinstance(size, int) or not hasattr(value, "dtype"):  # torch.ops has any attribute
            return None
        own = getattr(value, "__dict__", None)
        more = tuple(self.key(item, 1) for item in list(own.items())) if own else ()
        kind = self._identity(type(value)), tuple(value.shape), str(value.dtype), more
        on_host = getattr(getattr(value, "device", None), "type", "cpu") in ("cpu", "c")
        if on_host and size <= _MAX_BYTES and not getattr(value.dtype, "hasobject", False):
            return *kind, _contents(value)
        count = writes(value)
        if count is None:
            raise _Unkeyed
        return *kind, self._identity(value), count


_FOLLOWED = (FunctionType, MethodType, functools.partial)  # `rebuild` looks into these
_CACHED = type(functools.lru_cache(number_of))


def _is_read(kind: type) -> bool:
    """Whether the state of its objects is in their attributes and items."""
    is_static, is_immutable = not kind.__flags__ & 1 << 9, kind.__flags__ & 1 << 8
    is_python = not is_static and not is_immutable  # of a `class` statement
    return is_python or kind in _READ or (kind.__module__ == "torch" and issubclass(kind, tuple))


def _slots(cls: type) -> list[str]:
    """Names of the slots of a class, those with two underscores as Python stores them."""
    found = []
    for base in cls.__mro__:
        named = vars(base).get("__slots__", ())
        for name in (named,) if isinstance(named, str) else list(named):
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if not name.startswith("__")]


def _members(namespace: dict[str, Any]) -> Iterator[object]:
    generated = ("__dict__", "__weakref__", "__doc__", "__annotations__", "_abc_impl",
                 "__slotnames__", "__dataclass_fields__", "__dataclass_params__")  # fmt: skip
    return (item for item in namespace.items() if item[0] not in generated)


def _is_others(module: str) -> bool:
    """Whether a module belongs to a library or to Python, and is assumed not to change."""
    return is_library(module) or module.partition(".")[0] in sys.stdlib_module_names


def _of_library(value: object) -> bool:
    if isinstance(value, FunctionType):  # `functools.wraps` copies another function's module
        return _is_others(str(value.__globals__.get("__name__", "")))
    return isinstance(value, type) and _is_others(value.__module__ or "")


def _contents(value: Any) -> bytes:
    if hasattr(value, "detach"):
        if not has_memory(value):
            raise _Unkeyed
        host = value.detach()
        # NumPy lacks bfloat16; a double holds any float
        value = (host.double() if host.is_floating_point() else host).numpy()
    contents: bytes = value.tobytes()
    return contents
