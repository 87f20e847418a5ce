"""A cache of traces. An entry is valid until something that the functors may read changes.

Values of fields are not part of the key. A functor's code is, and so are the plain attributes,
globals and closures it may read, and its helpers. A variant without a key is traced at every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from warploom import forks
from warploom.counters import count
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.stand_ins import unseen
from warploom.dsl.variants import constants
from warploom.dsl.variants.fingerprint import fingerprint
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant

_LIMIT = 256
_traced: OrderedDict[Hashable, tuple[TracedVariant, object]] = OrderedDict()
_lock = forks.lock()  # protects the dictionary; tracing happens outside of it


@unseen
def traced_once(variant: Variant) -> tuple[Hashable, TracedVariant]:
    """A variant's graphs, from the cache if they are there, and a key for what is built from them.

    The graphs themselves are that key: equal graphs, however they arose, make equal kernels.
    """
    key, alive = fingerprint(variant)
    if key is None:
        traced = _traced_now(variant)
        return traced, traced
    with _lock:
        found = _traced.get(key)
        if found is not None:
            _traced.move_to_end(key)
    if found is None:
        # the key contains ids of the objects in `alive`, so the entry keeps these alive
        found = _traced_now(variant), alive
        with _lock:
            _traced[key] = found
            while len(_traced) > _LIMIT:
                _traced.popitem(last=False)
    return found[0], found[0]


def _traced_now(variant: Variant) -> TracedVariant:
    count("traces")
    traced = trace(variant)
    constants.notice(variant)
    return traced
