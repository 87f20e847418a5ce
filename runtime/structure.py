"""What of a variant decides its kernel, as a key: so that equal variants are traced once.

Values of fields are not part of it. A functor's code is, and so are the plain attributes, globals
and closures it may read, and its helpers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from warploom.dsl.fields import VALUES
from warploom.dsl.purity import surroundings
from warploom.dsl.spec import SEATS, TracedVariant
from warploom.dsl.trace import trace
from warploom.dsl.variant import Variant

_LIMIT = 256
_traced: OrderedDict[Hashable, tuple[TracedVariant, object]] = OrderedDict()


def structure_key(variant: Variant) -> Hashable:
    """Class, code of the seats, and attributes that are no field values."""
    cls = type(variant)
    code = tuple(getattr(getattr(cls, seat), "__code__", None) for seat in SEATS)
    state = [(name, _key(value)) for name, value in vars(variant).items() if name != VALUES]
    return cls, code, variant.softmax, tuple(sorted(state, key=lambda item: item[0]))


def traced_once(variant: Variant) -> tuple[Hashable, TracedVariant]:
    """The variant's structure and its graphs, from the cache if it is known."""
    outside, alive = surroundings(variant)
    key = structure_key(variant), outside
    found = _traced.get(key)
    if found is None:
        # the variant and its surroundings are kept, since the key holds identities of theirs
        found = _traced[key] = (trace(variant), (variant, alive))
        while len(_traced) > _LIMIT:
            _traced.popitem(last=False)
    _traced.move_to_end(key)
    return key, found[0]


def _key(value: Any) -> Hashable:
    if isinstance(value, Variant):
        return structure_key(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_key(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    try:
        hash(value)
    except TypeError:
        return "identity", id(value)
    return type(value), value
